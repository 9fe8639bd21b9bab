"""Flags that no line of an answer may have, as ``--without`` names them."""

from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from megatron.run.dimension import Choices, Dimension
from megatron.run.edit import Edit


class Unwanted(NamedTuple):
    """A flag that is not to be chosen, or one of its values.

    Attributes:
        option: the flag.
        value: the words behind it, with blanks between them; ``None``: any.
    """

    option: str
    value: str | None = None

    def __str__(self) -> str:
        return self.option[2:] if self.value is None else f"{self.option[2:]}={self.value}"

    def is_in(self, edits: Sequence[Edit]) -> bool:
        """Return whether some edits ask for it."""
        return any(
            edit.option == self.option
            and edit.values is not None
            and self.value in (None, " ".join(edit.values))
            for edit in edits
        )


def unwanted_of(text: str) -> Unwanted:
    """Read ``tp-comm-overlap``, or with a value ``pipeline-schedule=zb-v``; dashes may precede it.

    Raises:
        ValueError: there is no name.
    """
    name, has_value, value = text.strip().lstrip("-").partition("=")
    if not name or (has_value and not value):
        raise ValueError("give the name of a flag, as tp-comm-overlap or pipeline-schedule=zb-v")
    return Unwanted(f"--{name}", value if has_value else None)


def unknown_among(unwanted: Sequence[Unwanted], options: Collection[str]) -> Iterator[str]:
    """Yield a line on each flag that the search would never choose.

    Args:
        unwanted: what is not to be chosen.
        options: the flags that the search chooses.
    """
    for own in unwanted:
        if own.option not in options:
            near = get_close_matches(own.option, options, 1)
            hint = f"did you mean {near[0][2:]}? " if near else ""
            known = ", ".join(sorted(option[2:] for option in options))
            yield f"--without {own}: {hint}the search chooses none but {known}"


def without(dimensions: Sequence[Dimension], unwanted: Sequence[Unwanted]) -> tuple[Dimension, ...]:
    """Return dimensions without the choices that ask for unwanted flags; some may have none."""
    return tuple(own._replace(choices=_left(own, unwanted)) for own in dimensions)


def _left(own: Dimension, unwanted: Sequence[Unwanted]) -> Choices:
    """Return the choices of a dimension without some."""
    return lambda flags: [
        choice for choice in own.choices(flags) if not any(one.is_in(choice) for one in unwanted)
    ]
