"""The flag of guarded runs that has a grammar: ``--iterations-to-skip``."""

from collections.abc import Sequence


def parse_iterations(words: Sequence[str]) -> frozenset[int]:
    """Read the words after ``--iterations-to-skip``, iterations counted from 1.

    Raises:
        ValueError: a word is no such number.
    """
    for word in words:
        if not (word.isascii() and word.isdigit() and int(word) > 0):
            raise ValueError(
                f"--iterations-to-skip {' '.join(words)}: {word!r} is no iteration; give whole "
                "numbers from 1 on, as the log counts them"
            )
    return frozenset(map(int, words))
