"""A plan is the ordered row of passes for every rank: what a schedule produces, and nothing else.

It knows no times and no communication. Dependencies follow from it by ``needs``; communication is
added by ``lower``; times come out of the simulator.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from megatron.schedules.passes import Pass

VOCABULARY_BARRIERS: Final[dict[str, int | None]] = {"none": None, "vocab-1": 2, "vocab-2": 1}
"""Barriers between the last stage's F and its B: Algorithm 1 has C1 and C2, Algorithm 2 only C1."""


@dataclass(frozen=True)
class Plan:
    """What every rank does, in order.

    Attributes:
        rows: for each rank its passes in the order of execution.
        stages: (rank, chunk) of every stage, in the order in which the data flows.
        microbatches: microbatches m of one iteration.
        barriers: collectives between the last F and its B when the vocabulary is split over the
            ranks; ``None`` when the first and the last stage hold the vocabulary layers whole.
        forward_only: the plan evaluates: it has no B, W and IB.
    """

    rows: tuple[tuple[Pass, ...], ...]
    stages: tuple[tuple[int, int], ...]
    microbatches: int
    barriers: int | None = None
    forward_only: bool = False

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks p."""
        return len(self.rows)

    @cached_property
    def chunks(self) -> int:
        """Model chunks per rank v."""
        return 1 + max(chunk for _, chunk in self.stages)

    @cached_property
    def stage_of(self) -> dict[tuple[int, int], int]:
        """Stage number of every (rank, chunk)."""
        return {place: stage for stage, place in enumerate(self.stages)}

    @cached_property
    def split_backward(self) -> bool:
        """Whether weight gradients are passes of their own."""
        return any(p.kind == "W" for p in self.rows[0])

    def to_text(self) -> str:
        """Return the text form: a header and one row of passes per rank."""
        header = [
            f"microbatches {self.microbatches}",
            "stages " + " ".join(f"{rank}.{chunk}" for rank, chunk in self.stages),
            f"barriers {'none' if self.barriers is None else self.barriers}",
        ]
        if self.forward_only:
            header.append("forward only")
        rows = (f"{rank}: {' '.join(map(str, row))}" for rank, row in enumerate(self.rows))
        return "\n".join([*header, *rows]) + "\n"

    @classmethod
    def from_text(cls, text: str) -> "Plan":
        """Read a text form; ``#`` starts a comment. The result is not checked: see ``check``.

        Raises:
            ValueError: if a line cannot be read, naming it.
        """
        header: dict[str, str] = {}
        rows: list[tuple[Pass, ...]] = []
        for number, raw in enumerate(text.splitlines(), 1):
            line = raw.split("#")[0].strip()
            try:
                name, _, value = line.partition(" ")
                if name.endswith(":"):
                    rows.append(_row(name, value, len(rows)))
                elif line:
                    _add_header(header, name, value.strip())
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
        missing = [name for name in ("microbatches", "stages", "barriers") if name not in header]
        if missing:
            raise ValueError(f"a plan begins with its {', '.join(missing)}: add that line")
        return cls(
            rows=tuple(rows),
            stages=_stages(header["stages"]),
            microbatches=int(header["microbatches"]),
            barriers=None if header["barriers"] == "none" else int(header["barriers"]),
            forward_only="forward" in header,
        )


_HEADER: Final = {
    "microbatches": re.compile(r"\d+"),
    "stages": re.compile(r"\d+\.\d+( +\d+\.\d+)*"),
    "barriers": re.compile(r"none|\d+"),
    "forward": re.compile("only"),
}


def _add_header(header: dict[str, str], name: str, value: str) -> None:
    if name not in _HEADER:
        raise ValueError(f"'{name}' is no header line: write one of {', '.join(_HEADER)}")
    if name in header:
        raise ValueError(f"'{name}' stands there twice")
    if not _HEADER[name].fullmatch(value):
        raise ValueError(
            f"'{name} {value}' cannot be read: write 'microbatches M', 'stages RANK.CHUNK ...', "
            "'barriers none' or 'barriers N', or 'forward only'"
        )
    header[name] = value


def _stages(text: str) -> tuple[tuple[int, int], ...]:
    places = (word.partition(".") for word in text.split())
    return tuple((int(rank), int(chunk)) for rank, _, chunk in places)


def _row(name: str, value: str, rank: int) -> tuple[Pass, ...]:
    if name != f"{rank}:":
        raise ValueError(f"expected the row of rank {rank}, got '{name}'")
    return tuple(Pass.parse(word) for word in value.split())


def evaluation_plan(plan: Plan) -> Plan:
    """Return the plan that evaluates with the same stages and vocabulary: IF, F, S and T.

    T then only reads the loss from what the barrier has merged.
    """
    rows = tuple(tuple(p for p in row if p.kind in ("IF", "F", "S", "T")) for row in plan.rows)
    return Plan(rows, plan.stages, plan.microbatches, plan.barriers, forward_only=True)
