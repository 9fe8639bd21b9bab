"""The flags of the tokenizer, which tools use too, and the flags of fill-in-the-middle.

Fill-in-the-middle moves the middle of a document to its end, so that a model learns to fill gaps.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from megatron.data.config import FillConfig
from megatron.data.tokenizers.build import TYPES, build_tokenizer
from megatron.data.tokenizers.byte_pairs import PATTERNS
from megatron.data.tokenizers.interface import Tokenizer, TokenizerConfig
from megatron.flags.declare import flag, option_of
from megatron.flags.ranges import PROBABILITY, Range, up_to

_GPT2 = "--tokenizer-type GPT2BPETokenizer"
_TIKTOKEN = "--tokenizer-type TikTokenizer"
_ON: Final = "--fim-data"


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class TokenizerFlags:
    """Tokenizer and vocabulary."""

    tokenizer_type: str | None = flag(None,
        "Kind of the tokenizer, by Megatron's name.", choices=tuple(TYPES),
        unset="required, except with --vocab-size and --dry-run or --mock-data")
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
    """Return the configuration of a tokenizer of this type, with the values of all its flags."""
    named = {field.name: getattr(flags, field.name) for field in fields(TokenizerConfig)}
    return TokenizerConfig(**(named | {"tokenizer_type": tokenizer_type}))


def tokenizer_of(flags: TokenizerFlags) -> TokenizerConfig | None:
    """Return the tokenizer that the flags name; ``None``: they name no tokenizer."""
    return None if flags.tokenizer_type is None else tokenizer_config(flags, flags.tokenizer_type)


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class FillFlags:
    """Fill-in-the-middle."""

    fim_data: bool = flag(False,
        "Move the middles of documents to their ends, behind tokens that name the parts.",
        needs="--tokenizer-type HuggingFaceTokenizer", excludes="--mock-data",
        lack="names tokens such as <fim_prefix>, which a HuggingFaceTokenizer can have")
    fim_rate: float = flag(0.5, "Share of the documents in a sample.", PROBABILITY,
        idle_without=_ON)
    fim_spm_rate: float = flag(0.5,
        "Share of the --fim-rate documents whose suffix comes before their prefix.",
        PROBABILITY, idle_without=_ON)
    fim_split_sample: str | None = flag(None,
        "Token that cuts a document into fragments, such as files. Each fragment is then treated "
        "by itself.",
        unset="none", metavar="TOKEN", idle_without=_ON)
    fim_fragment_rate: float | None = flag(None,
        "Share of the fragments of a document whose middle is moved.", PROBABILITY,
        unset="--fim-rate", idle_without="--fim-split-sample")
    fim_no_prefix: str | None = flag(None,
        "Leave a text unchanged that begins with this prefix.",
        unset="none", metavar="TEXT", idle_without=_ON)
    fim_prefix_token: str = flag("<fim_prefix>", "Token before the prefix.", idle_without=_ON)
    fim_middle_token: str = flag("<fim_middle>", "Token before the middle.", idle_without=_ON)
    fim_suffix_token: str = flag("<fim_suffix>", "Token before the suffix.", idle_without=_ON)
    fim_pad_token: str = flag("<fim_pad>",
        "Token that fills up a sample that has become shorter.", idle_without=_ON)
    fim_eod_token: str | None = flag(None, "Token that ends a document.",
        unset="the tokenizer's", metavar="TOKEN", idle_without=_ON)
# fmt: on


def fill_config(flags: FillFlags, tokenizer: TokenizerFlags) -> FillConfig | None:
    """Return the configuration of fill-in-the-middle; ``None``: it is off.

    Raises:
        ValueError: the tokenizer cannot be read, or lacks a token that a flag names.
    """
    if not flags.fim_data or tokenizer.tokenizer_type is None:
        return None
    config = tokenizer_config(tokenizer, tokenizer.tokenizer_type)
    built = build_tokenizer(config)

    def id_of(name: str) -> int:
        return _id_of(getattr(flags, name), option_of(name), built)

    return FillConfig(
        config,
        flags.fim_rate,
        flags.fim_spm_rate,
        prefix_token=id_of("fim_prefix_token"),
        middle_token=id_of("fim_middle_token"),
        suffix_token=id_of("fim_suffix_token"),
        pad_token=id_of("fim_pad_token"),
        end_token=built.eod if flags.fim_eod_token is None else id_of("fim_eod_token"),
        split_token=None if flags.fim_split_sample is None else id_of("fim_split_sample"),
        fragment_rate=(
            flags.fim_rate if flags.fim_fragment_rate is None else flags.fim_fragment_rate
        ),
        no_prefix=flags.fim_no_prefix,
    )


def _id_of(token: str, option: str, tokenizer: Tokenizer) -> int:
    ids = tokenizer.tokenize(token)
    if len(ids) != 1 or tokenizer.detokenize(ids) != token:
        raise ValueError(
            f"{option} {token}: the tokenizer has no such token; add it to its folder "
            "(tokenizer.add_special_tokens, save_pretrained), or name one that it has"
        )
    return ids[0]
