"""Makes the tokenizer that the flags describe."""

from collections.abc import Callable, Mapping
from typing import Final

from megatron.data.tokenizers.byte_pairs import GPT2BPETokenizer, TikTokenizer
from megatron.data.tokenizers.hugging_face import HuggingFaceTokenizer
from megatron.data.tokenizers.interface import Tokenizer
from megatron.data.tokenizers.null import NullTokenizer
from megatron.data.tokenizers.sentence_pieces import (
    GPTSentencePieceTokenizer,
    Llama2Tokenizer,
    SentencePieceTokenizer,
    model_file,
)
from megatron.data.tokenizers.settings import TYPES, TokenizerSettings

MOST_IDS: Final = 1 << 31
"""The largest vocabulary of Megatron-LM's token files, which hold ids as signed 32-bit numbers."""


def build_tokenizer(config: TokenizerSettings) -> Tokenizer:
    """Make a tokenizer.

    Returns:
        The tokenizer; its ``vocab_size`` may differ from the flag ``--vocab-size``.

    Raises:
        ValueError: a flag is missing, unknown or at odds with the model; a file cannot be used; or
            a library is not installed.
    """
    if config.tokenizer_type not in TYPES:
        raise ValueError(
            f"--tokenizer-type {config.tokenizer_type} is not available; choose one of "
            f"{', '.join(TYPES)}"
        )
    tokenizer = _MAKERS[config.tokenizer_type](config)
    if tokenizer.vocab_size > MOST_IDS:
        raise ValueError(
            f"{_source(config)} gives a token the id {tokenizer.vocab_size - 1}, and token files "
            f"hold ids up to {MOST_IDS - 1}: number its tokens from 0 on"
        )
    least = config.vocab_size
    is_null = config.tokenizer_type == "NullTokenizer"  # adds an end-of-document token
    if least is not None and least < tokenizer.vocab_size and not is_null:
        raise ValueError(
            f"--vocab-size {least} is smaller than the {tokenizer.vocab_size} entries "
            f"of {_source(config)}; leave the flag out or raise it"
        )
    return tokenizer


def _source(config: TokenizerSettings) -> str:
    if config.tokenizer_type == "GPT2BPETokenizer":
        return f"--vocab-file {config.vocab_file}"
    if config.tokenizer_type == "NullTokenizer":
        return f"--vocab-size {config.vocab_size}"
    return f"--tokenizer-model {config.tokenizer_model}"


def _null(config: TokenizerSettings) -> Tokenizer:
    if config.vocab_size is None or config.vocab_size < 1:
        raise ValueError(
            f"--vocab-size {config.vocab_size}: --tokenizer-type NullTokenizer needs a positive "
            "size, as it has no model to read it from"
        )
    return NullTokenizer(config.vocab_size)


_MAKERS: Final[Mapping[str, Callable[[TokenizerSettings], Tokenizer]]] = {
    "GPTSentencePieceTokenizer": lambda config: GPTSentencePieceTokenizer(model_file(config)),
    "SentencePieceTokenizer": lambda config: SentencePieceTokenizer(
        model_file(config), config.vocab_extra_ids
    ),
    "Llama2Tokenizer": lambda config: Llama2Tokenizer(model_file(config)),
    "TikTokenizer": TikTokenizer,
    "GPT2BPETokenizer": GPT2BPETokenizer,
    "HuggingFaceTokenizer": HuggingFaceTokenizer,
    "NullTokenizer": _null,
}
"""For each kind of ``TYPES`` the function that makes its tokenizer."""
