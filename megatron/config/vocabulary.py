"""The size of a run's vocabulary: the tokenizer's size, or the number of a flag."""

from collections.abc import Iterator
from functools import partial

from megatron.config.dry_run import DryRunSettings
from megatron.data.settings import DataSettings
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.flags.groups import Flags, faults_of
from megatron.flags.rules import refuses


def vocabulary(flags: Flags) -> tuple[int, int]:
    """Return the vocabulary's size and the token that ends a document.

    Without a tokenizer (made-up data need none), the size is --vocab-size, and its last token ends
    a document.

    Raises:
        ValueError: the tokenizer is unknown, its file cannot be used, or --vocab-size does not fit.
    """
    given = flags[TokenizerSettings]
    kind, size = given.tokenizer_type, given.vocab_size or 0
    if kind is None:
        return size, max(size - 1, 0)
    if flags[DryRunSettings].dry_run and size:
        return size, 0  # a dry run does not read the tokenizer's file, which may not be here
    tokenizer = build_tokenizer(given)
    # --vocab-size may add entries to a tokenizer's own; build_tokenizer refuses fewer.
    return max(tokenizer.vocab_size, size), tokenizer.eod


@refuses
def _tokenizer(flags: Flags) -> Iterator[str]:
    needless = flags[DryRunSettings].dry_run or flags[DataSettings].mock_data
    if flags[TokenizerSettings].tokenizer_type is None and not (
        needless and flags[TokenizerSettings].vocab_size
    ):
        yield (
            "--tokenizer-type is missing: give GPTSentencePieceTokenizer with --tokenizer-model "
            "FILE, another type that docs/data.md lists, or NullTokenizer with --vocab-size N for "
            "data without a tokenizer; with --mock-data or --dry-run, --vocab-size N is enough"
        )
    else:
        yield from faults_of(partial(vocabulary, flags))
