"""The size of a run's vocabulary: the tokenizer's size, or the number of a flag."""

from functools import lru_cache
from typing import TypeAlias

from megatron.data.tokenizers.build import build_tokenizer
from megatron.data.tokenizers.settings import TokenizerSettings
from megatron.flags.groups import Flags
from megatron.run.dry_run import DryRunSettings

Stamps: TypeAlias = tuple[tuple[str, int, int], ...]
"""Name, time of change and bytes of each of some files."""


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
    return _read(given, stamps_of(given))


@lru_cache(4)
def _read(given: TokenizerSettings, stamps: Stamps) -> tuple[int, int]:
    """Return the vocabulary of a tokenizer; all ways that ``auto`` compares read it once."""
    tokenizer = build_tokenizer(given)
    # --vocab-size may add entries to a tokenizer's own; build_tokenizer refuses fewer.
    return max(tokenizer.vocab_size, given.vocab_size or 0), tokenizer.eod


def stamps_of(given: TokenizerSettings) -> Stamps:
    """Return the times and sizes of a tokenizer's files, which tell whether they have changed.

    Files of a folder are among them. A file that is missing has none.
    """
    named = [own for own in (given.tokenizer_model, given.vocab_file, given.merge_file) if own]
    files = [file for own in named for file in (own, *(own.iterdir() if own.is_dir() else ()))]
    stats = ((str(file), file.stat()) for file in sorted(files) if file.exists())
    return tuple((name, own.st_mtime_ns, own.st_size) for name, own in stats)
