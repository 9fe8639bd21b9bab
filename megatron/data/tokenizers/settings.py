"""The settings of a tokenizer, which training and tools share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron.flags.declare import flag
from megatron.flags.ranges import Range, up_to

TYPES: Final = (
    *("GPTSentencePieceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer"),
    *("GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer"),
)
"""Every kind of tokenizer, by Megatron's name."""

TIKTOKEN_PATTERNS: Final = ("v1", "v2")
"""Expressions that cut text into words, by Megatron-LM's names."""

_GPT2: Final = "--tokenizer-type GPT2BPETokenizer"
_TIKTOKEN: Final = "--tokenizer-type TikTokenizer"


@dataclass(frozen=True)
class TokenizerSettings:
    """Tokenizer and vocabulary."""

    # fmt: off
    tokenizer_type: str | None = flag(None,
        "Kind of the tokenizer, by Megatron's name.", choices=TYPES,
        unset="that of the checkpoint of --load; without one required, except with --vocab-size "
        "and --dry-run or --mock-data")
    tokenizer_model: Path | None = flag(None,
        "File of the tokenizer: a sentencepiece model, tiktoken's vocabulary in JSON, or the "
        "folder of a HuggingFaceTokenizer.", unset="none", idle_without="--tokenizer-type",
        idle_with=f"--tokenizer-type NullTokenizer or {_GPT2}")
    vocab_file: Path | None = flag(None, "GPT-2's vocab.json.", unset="none", idle_without=_GPT2)
    merge_file: Path | None = flag(None, "GPT-2's merges.txt.", unset="none", idle_without=_GPT2)
    vocab_size: int | None = flag(None,
        "Entries of the vocabulary before padding. With TikTokenizer: entries that are read from "
        "its file; 131072 if not given.",
        up_to((1 << 31) - 1), unset="the tokenizer's")
    vocab_extra_ids: int = flag(0, "Entries <extra_id_N> added to the tokenizer's.",
        Range(0, 1 << 24),
        idle_without="--tokenizer-type SentencePieceTokenizer")
    tiktoken_pattern: str = flag("v2",
        "How text is cut into words, by Megatron's name of the expression.",
        choices=TIKTOKEN_PATTERNS, idle_without=_TIKTOKEN)
    tiktoken_num_special_tokens: int = flag(1000, "Ids kept for special tokens.",
        up_to((1 << 31) - 1), idle_without=_TIKTOKEN)
    tokenizer_special_tokens: tuple[str, ...] = flag((), "Names of the first special tokens.",
        unset="<unk> <s> </s> <mask> <pad> <cls> <sep>", metavar="TOKEN ...",
        idle_without=_TIKTOKEN)
    tokenizer_hf_include_special_tokens: bool = flag(False,
        "Add to every text the special tokens that the folder asks for, such as one at the "
        "beginning.", idle_without="--tokenizer-type HuggingFaceTokenizer")
    # fmt: on
