"""Flags of the tokenizer; training and tools/preprocess_data.py read the same ones."""

from dataclasses import dataclass, fields
from pathlib import Path

from megatron.config.declare import NOT_NEGATIVE, flag, up_to
from megatron.data.tokenizers.build import TYPES
from megatron.data.tokenizers.byte_pairs import PATTERNS
from megatron.data.tokenizers.interface import TokenizerConfig

_GPT2 = "--tokenizer-type GPT2BPETokenizer"
_TIKTOKEN = "--tokenizer-type TikTokenizer"


# The formatter is off so that a declaration reads as a few lines.
# fmt: off
@dataclass(frozen=True)
class TokenizerFlags:
    """Tokenizer and vocabulary."""

    tokenizer_type: str | None = flag(None, "Megatron's name of it.", choices=tuple(TYPES),
        unset="required but for --vocab-size with --dry-run or --mock-data")
    tokenizer_model: Path | None = flag(None,
        "File of the tokenizer: a sentencepiece model, tiktoken's vocabulary in JSON, or the "
        "folder of a HuggingFaceTokenizer.", unset="none", idle_without="--tokenizer-type",
        idle_with=f"--tokenizer-type NullTokenizer or {_GPT2}")
    vocab_file: Path | None = flag(None, "GPT-2's vocab.json.", unset="none", idle_without=_GPT2)
    merge_file: Path | None = flag(None, "GPT-2's merges.txt.", unset="none", idle_without=_GPT2)
    vocab_size: int | None = flag(None,
        "Entries before padding; of a TikTokenizer's file as many are read, or 131072.",
        up_to((1 << 31) - 1), unset="the tokenizer's")
    vocab_extra_ids: int = flag(0, "Entries <extra_id_N> added to the tokenizer's.", NOT_NEGATIVE,
        idle_without="--tokenizer-type SentencePieceTokenizer")
    tiktoken_pattern: str = flag("v2",
        "How text is cut into words, by Megatron's name of the expression.",
        choices=tuple(PATTERNS), idle_without=_TIKTOKEN)
    tiktoken_num_special_tokens: int = flag(1000, "Ids kept for special tokens.",
        up_to((1 << 31) - 1), idle_without=_TIKTOKEN)
    tokenizer_special_tokens: tuple[str, ...] = flag((), "Names of the first special tokens.",
        unset="<unk> <s> </s> <mask> <pad> <cls> <sep>", metavar="TOKEN ...",
        idle_without=_TIKTOKEN)
    tokenizer_hf_include_special_tokens: bool = flag(False,
        "Add to every text the special tokens that the folder asks for, such as one at the "
        "beginning.", idle_without="--tokenizer-type HuggingFaceTokenizer")


# fmt: on
def tokenizer_config(flags: TokenizerFlags, tokenizer_type: str) -> TokenizerConfig:
    """Describe the tokenizer of that type with all that the flags say about it."""
    named = {field.name: getattr(flags, field.name) for field in fields(TokenizerConfig)}
    return TokenizerConfig(**(named | {"tokenizer_type": tokenizer_type}))
