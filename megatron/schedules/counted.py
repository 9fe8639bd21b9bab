"""A number with its noun, as a reader expects it: 1 microbatch, 2 microbatches."""

from typing import Final

_PLURALS: Final = {
    "batch": "batches",
    "copy": "copies",
    "family": "families",
    "microbatch": "microbatches",
    "pass": "passes",
}


def were(number: float) -> str:
    """Return the verb of the past for a number of things."""
    return "was" if number == 1 else "were"


def counted(number: float, noun: str, *, grouped: bool = False) -> str:
    """Return a number with its noun, which is in the plural unless the number is 1.

    Args:
        number: a whole number is written in full, any other number with four digits.
        noun: in the singular; if it has several words, the first word takes the plural.
        grouped: whether thousands are told apart by commas, as in 1,000,000.
    """
    written = (
        f"{number:,}" if grouped else str(number) if isinstance(number, int) else f"{number:.4g}"
    )
    if written == "1":
        return f"1 {noun}"
    first, *others = noun.split(" ")
    return " ".join([written, _PLURALS.get(first, f"{first}s"), *others])
