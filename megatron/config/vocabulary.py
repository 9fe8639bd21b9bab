"""The size of a run's vocabulary: the tokenizer's size, or the number of a flag."""

from megatron.config.dry_run import DryRunSettings
from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.flags.groups import Flags


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
