"""A number with its noun, as a reader expects it: 1 microbatch, 2 microbatches."""

from typing import Final

_PLURALS: Final = {
    "batch": "batches",
    "copy": "copies",
    "microbatch": "microbatches",
    "pass": "passes",
}


def counted(number: float, noun: str) -> str:
    """Return a number with its noun, which is in the plural unless the number is 1.

    Args:
        number: a whole number is written in full, any other number with four digits.
        noun: in the singular; if it has several words, the first word takes the plural.
    """
    written = str(number) if isinstance(number, int) else f"{number:.4g}"
    if written == "1":
        return f"1 {noun}"
    first, *others = noun.split(" ")
    return " ".join([written, _PLURALS.get(first, f"{first}s"), *others])
