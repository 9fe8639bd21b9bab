"""Command lines made of a usual one and the flags under test."""

from collections.abc import Sequence


def with_flags(usual: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return the usual words with ``flags`` behind them, and in place of those of the same name."""
    given = {word.partition("=")[0].replace("_", "-") for word in flags}
    kept, option = [], ""
    for word in usual:
        option = word if word.startswith("--") else option
        if option not in given:
            kept.append(word)
    return [*kept, *flags]
