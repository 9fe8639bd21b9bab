"""What becomes of every flag of a command line: it is accepted, noted, or refused with a reason."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron.flags.words import spelling
from megatron.run.foreign.answers import FEATURES

Verdict = Literal["accepted", "noted", "refused"]


@dataclass(frozen=True)
class Told:
    """How this program treats one flag of a command line.

    Attributes:
        flag: the flag with its values.
        verdict: whether the flag is accepted silently, noted or refused.
        line: the line that is printed; empty: nothing is printed.
    """

    flag: str
    verdict: Verdict
    line: str

    @property
    def feature(self) -> str:
        """The name of the missing feature; empty for a mistake of another kind."""
        return next((f.name for f in FEATURES if self.line.endswith(f": {f.reason}")), "")

    @property
    def said(self) -> str:
        """The line without the flag that begins it."""
        option, _, values = self.flag.partition(" ")
        written = f"{spelling(option)} {values}".rstrip()
        rest = self.line.removeprefix(written)
        if rest.startswith(", "):  # the line is about several flags
            return f"and {rest[2:]}"
        return self.line if rest[:1] not in " :" else rest.lstrip(": ")  # 5 may be told as 5.0


def told_of(
    flags: Sequence[Sequence[str]], mistakes: Sequence[str], notes: Sequence[str]
) -> list[Told]:
    """Return the treatment of every flag, and of flags of ours that the line lacks.

    Args:
        flags: each flag of the line with its values.
        mistakes: the lines on mistakes of ``command_line.read``.
        notes: its lines on flags that change nothing, or are read as others.
    """
    lines: list[tuple[Verdict, Sequence[str]]] = [("refused", mistakes), ("noted", notes)]
    answers = []
    for flag in flags:
        said = ((verdict, line) for verdict, some in lines for line in some if is_of(line, flag[0]))
        answers.append(Told(" ".join(flag), *next(said, ("accepted", ""))))
    listed = [flag[0] for flag in flags]
    others = [line for line in mistakes if not any(is_of(line, one) for one in listed)]
    return [*answers, *(Told(line.split()[0], "refused", line) for line in others)]


def is_of(line: str, option: str) -> bool:
    """Return whether a line on a mistake or a note is about a flag."""
    return line.split(maxsplit=1)[0].rstrip(":") == spelling(option)
