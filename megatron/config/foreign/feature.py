"""What is missing here and which flags ask for it: a row of the table in ``missing.py``."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.foreign.answer import Row, rows
from megatron.config.foreign.line import Condition


@dataclass(frozen=True)
class Idle:
    """Flags of a missing feature that change nothing where it is not asked for.

    Attributes:
        reason: why.
        when: where; elsewhere they are refused. ``None``: for the values that the flags are given
            with here.
        flags: the flags; see ``answer``.
    """

    reason: str
    when: Condition | None
    flags: str


@dataclass(frozen=True)
class Feature:
    """Something that is missing.

    Attributes:
        name: a few words, for tables.
        lack: what is missing, in a clause.
        way_out: what to do instead.
        flags: the flags that ask for it, and values of this project's flags; see ``answer``.
        idle: flags that ask for nothing on some lines.
        decides: a flag of this project whose value is not known where one of these flags is given.
    """

    name: str
    lack: str
    way_out: str
    flags: str
    idle: tuple[Idle, ...] = ()
    decides: str = ""

    @property
    def reason(self) -> str:
        """Why its flags are refused, and the way out."""
        return f"{self.lack}; {self.way_out}"

    @property
    def noted(self) -> Iterator[Row]:
        """The flags that change nothing, where they do not."""
        for idle in self.idle:
            yield from rows("noted", idle.reason, idle.flags, idle.when)

    @property
    def refused(self) -> Iterator[Row]:
        """The flags that are refused wherever no other answer stands before."""
        conditional = (idle.flags for idle in self.idle if idle.when is not None)
        for flags in (self.flags, *conditional):
            yield from rows("refused", self.reason, flags, feature=self.name)
