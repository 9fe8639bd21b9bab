"""A plan is the ordered row of passes for every rank: what a schedule produces, and nothing else.

It knows no times and no communication. Dependencies follow from it by ``needs``; communication is
added by ``lower``; times come out of the simulator.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

from megatron.schedules.passes import Pass, PassKind


class Treatment(NamedTuple):
    """What a treatment of the vocabulary makes of a plan.

    Attributes:
        barriers: collectives between the last stage's F and its B; ``None`` where the first and the
            last stage hold the vocabulary layers whole.
        synchronous: every rank waits on the spot for these collectives, and for the broadcast of
            what they start from.
        redistributed: the first and the last stage have the fewer transformer layers for it.
    """

    barriers: int | None = None
    synchronous: bool = False
    redistributed: bool = False


TREATMENTS: Final[Mapping[str, Treatment]] = {
    "none": Treatment(),
    "redis": Treatment(redistributed=True),
    "naive": Treatment(barriers=3),
    "vocab-1": Treatment(barriers=2),
    "vocab-2": Treatment(barriers=1),
    "interlaced": Treatment(barriers=2, synchronous=True),
}
"""Every treatment of the vocabulary by its name. Algorithm 2 has only the barrier C1, Algorithm 1
also C2, and the naive order one for the maximum, the sum and the gradient each (arXiv 2411.05288,
section 4). Interlaced is Algorithm 1 with nothing between its passes."""


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
        synchronous: every rank waits for each collective of the output layer as soon as it takes
            part (``interlaced``); S and T of a microbatch stand next to each other. Those of the
            input layer are waited for where they are needed, as in any plan.
    """

    rows: tuple[tuple[Pass, ...], ...]
    stages: tuple[tuple[int, int], ...]
    microbatches: int
    barriers: int | None = None
    forward_only: bool = False
    synchronous: bool = False

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
        if self.synchronous:
            header.append("collectives synchronous")
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
            synchronous="collectives" in header,
        )


_HEADER: Final = {
    "microbatches": re.compile(r"\d+"),
    "stages": re.compile(r"\d+\.\d+( +\d+\.\d+)*"),
    "barriers": re.compile(r"none|\d+"),
    "forward": re.compile("only"),
    "collectives": re.compile("synchronous"),
}


def _add_header(header: dict[str, str], name: str, value: str) -> None:
    if name not in _HEADER:
        raise ValueError(f"'{name}' is no header line: write one of {', '.join(_HEADER)}")
    if name in header:
        raise ValueError(f"'{name}' stands there twice")
    if not _HEADER[name].fullmatch(value):
        raise ValueError(
            f"'{name} {value}' cannot be read: write 'microbatches M', 'stages RANK.CHUNK ...', "
            "'barriers none' or 'barriers N', 'forward only', or 'collectives synchronous'"
        )
    header[name] = value


def _stages(text: str) -> tuple[tuple[int, int], ...]:
    places = (word.partition(".") for word in text.split())
    return tuple((int(rank), int(chunk)) for rank, _, chunk in places)


def _row(name: str, value: str, rank: int) -> tuple[Pass, ...]:
    if name != f"{rank}:":
        raise ValueError(f"expected the row of rank {rank}, got '{name}'")
    return tuple(Pass.parse(word) for word in value.split())


def passes_of(plan: Plan, rank: int) -> tuple[Pass, ...]:
    """Return the passes of microbatch 0 that ``rank`` must run; every microbatch has the same."""
    kinds: list[PassKind] = ["F"] if plan.forward_only else ["F", "B"]
    if plan.split_backward:
        kinds.append("W")
    chunks = [chunk for owner, chunk in plan.stages if owner == rank]
    passes = [Pass(kind, 0, chunk) for kind in kinds for chunk in chunks]
    if plan.barriers is not None:
        inserted = vocabulary_passes(plan.barriers)
        passes += [Pass(kind, 0) for kind in inserted if kind != "IB" or not plan.forward_only]
    return tuple(passes)


def vocabulary_passes(barriers: int | None) -> tuple[PassKind, ...]:
    """Return the kinds of pass that every rank runs for its shard of the vocabulary."""
    if barriers is None:
        return ()
    return ("S", "E", "T", "IF", "IB") if barriers == 3 else ("S", "T", "IF", "IB")


def evaluation_plan(plan: Plan) -> Plan:
    """Return the plan that evaluates with the same stages and vocabulary: IF, F, S, E and T.

    T then only reads the loss from what the barrier has merged.
    """
    rows = tuple(tuple(p for p in row if p.kind in ("IF", "F", "S", "E", "T")) for row in plan.rows)
    return replace(plan, rows=rows, forward_only=True)
