"""Values of a script's variables, with holes where a reader cannot know them.

A value is a text. A hole in it is the number of a ``Hole`` between two zero bytes, which no shell
can have in a value. So a value with holes is split, joined and compared as any other text.
"""

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final

from megatron.foreign.faults import (
    LONGEST_VALUE,
    MOST_LOOKS,
    MOST_STEPS,
    MOST_TEXT,
    ScriptError,
)

HOLE: Final = re.compile("\0([0-9]+)\0")

_AMBIENT: Final = (
    *("HOME", "USER", "LOGNAME", "PWD", "OLDPWD", "HOSTNAME", "SHELL", "TMPDIR", "UID", "RANDOM"),
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "CONDA_PREFIX", "VIRTUAL_ENV", "SLURM_*"),
)
"""Variables that a shell or a launcher sets."""

Array = dict[str, str]
"""The values of an array by their subscripts."""


def is_ambient(name: str) -> bool:
    """Return whether a shell or a launcher sets a variable, so that a script need not."""
    return any(fnmatchcase(name, pattern) for pattern in _AMBIENT)


@dataclass(frozen=True)
class Hole:
    """A part of a value that a reader cannot know.

    Attributes:
        text: as it is written in the script, such as ``$DATA`` or ``$(hostname)``.
        name: the variable that would tell the value; empty: there is none.
        line: number of the line of its first use.
        choices: the values that branches of the script give it.
        assigned: of a variable, the value that it has been given, with holes; empty: not one value.
    """

    text: str
    name: str
    line: int
    choices: tuple[str, ...] = ()
    assigned: str = ""

    @property
    def way_out(self) -> str:
        """How a user tells the value."""
        own = self.name or self.text
        return f"--set '{own}=...'" if not self.name else f"--set {own}=..."


class Holes:
    """All holes of a script, each with its number."""

    def __init__(self) -> None:
        self._all: list[Hole] = []
        self._numbers: dict[tuple[str, str, tuple[str, ...], str], int] = {}

    def mark(self, hole: Hole) -> str:
        """Return the mark that stands for a hole in a value."""
        key = hole.text, hole.name, hole.choices, hole.assigned
        number = self._numbers.setdefault(key, len(self._all))
        if number == len(self._all):
            self._all.append(hole)
        return f"\0{number}\0"

    def within(self, value: str) -> list[Hole]:
        """Return the holes of a value, in order."""
        return [self._all[int(number)] for number in HOLE.findall(value)]

    def shown(self, value: str) -> str:
        """Return a value with its holes as the script writes them."""
        return HOLE.sub(lambda found: self._all[int(found[1])].text, value)

    def split(self, value: str) -> list[str | Hole]:
        """Return the parts of a value: texts and holes."""
        parts: list[str | Hole] = list(HOLE.split(value))
        for place in range(1, len(parts), 2):
            parts[place] = self._all[int(str(parts[place]))]
        return [part for part in parts if part != ""]


def is_hole(value: str) -> bool:
    """Return whether a value is a hole and nothing else."""
    return HOLE.fullmatch(value) is not None


@dataclass
class Budget:
    """The work that a script may ask for."""

    steps: int = 0
    text: int = 0
    looks: int = 0

    def look(self, line: int) -> None:
        """Count a command that is looked at without being followed.

        Raises:
            ScriptError: there are too many.
        """
        self.looks += 1
        if self.looks > MOST_LOOKS:
            raise ScriptError(line, "too many commands in loops and calls: give a shorter script")

    def step(self, line: int) -> None:
        """Count a command or a branch.

        Raises:
            ScriptError: there are too many.
        """
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise ScriptError(line, f"more than {MOST_STEPS:,} commands: give a shorter script")

    def keep(self, line: int, name: str, size: int) -> None:
        """Count the characters of a value.

        Raises:
            ScriptError: the value is too long, or all values together are.
        """
        self.text += size
        if size > LONGEST_VALUE:
            raise ScriptError(
                line, f"{name} has more than {LONGEST_VALUE:,} characters: shorten it"
            )
        if self.text > MOST_TEXT:
            raise ScriptError(
                line, f"variables with more than {MOST_TEXT:,} characters: shorten it"
            )


@dataclass
class Scope:
    """The variables of a script at one place of it.

    Attributes:
        values: the value of each variable that is set.
        places: values of $1, $2 and so on.
        has_places: whether ``places`` are known; if not, ``values`` may have some of them.
    """

    values: dict[str, str | Array] = field(default_factory=dict)
    places: tuple[str, ...] = ()
    has_places: bool = False

    def copy(self) -> "Scope":
        """Return a scope whose changes do not change this one."""
        values = {n: dict(v) if isinstance(v, dict) else v for n, v in self.values.items()}
        return Scope(values, self.places, self.has_places)

    def get(self, name: str) -> str | None:
        """Return the value of a variable, or an array's first; ``None`` if not set."""
        if name.isdigit():
            place = int(name) - 1 if len(name) < 4 else -1
            if self.has_places:
                return self.places[place] if 0 <= place < len(self.places) else ""
        value = self.values.get(name)
        return value.get("0") if isinstance(value, dict) else value

    def all_of(self, name: str) -> list[str] | None:
        """Return all values of an array; ``None``: the array is not set."""
        if name in ("@", "*"):
            return list(self.places)
        value = self.values.get(name)
        return [value] if isinstance(value, str) else None if value is None else [*value.values()]
