"""What a pass needs before it may start: the only place that knows the dependencies.

A need is either an earlier pass of the same rank or a communication. A communication in turn has
sources, the passes whose results it moves, and participants, the ranks that take part. Checking,
lowering, simulating and executing all ask here.
"""

from typing import Final, Literal, NamedTuple, get_args

from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan

CommKind = Literal["X", "G", "C0", "C1", "C2", "CIF", "CIB"]
"""X activation to the next stage, G gradient to the previous one; C0 broadcast of the last stage's
output, C1 and C2 the barriers of the output layer (DESIGN section 3); CIF reduction of the input
embedding to the first stage, CIB broadcast of its gradient from there."""

COMM_KINDS: Final[tuple[CommKind, ...]] = get_args(CommKind)
_MERGED: Final[dict[CommKind, Literal["S", "T", "IF"]]] = {"C1": "S", "C2": "T", "CIF": "IF"}
"""Collectives that gather from every rank, and the pass that each rank contributes."""


class Comm(NamedTuple):
    """One communication.

    Attributes:
        kind: what is moved.
        microbatch: for which microbatch.
        stage: the stage that sends, for X and G; 0 for the collectives.
    """

    kind: CommKind
    microbatch: int
    stage: int = 0

    def __str__(self) -> str:
        """Return a readable name, ``C1 3``, and for X and G the sending stage, ``X3 from 0``."""
        if self.kind in ("X", "G"):
            return f"{self.kind}{self.microbatch} from {self.stage}"
        return f"{self.kind} {self.microbatch}"


Need = Pass | Comm


def needs(plan: Plan, rank: int, item: Pass) -> tuple[Need, ...]:
    """Return what ``item`` waits for on ``rank``: passes of that rank, and communications."""
    kind, microbatch, chunk = item
    if kind == "F":
        return _forward_needs(plan, rank, item)
    if kind == "B":
        return _backward_needs(plan, rank, item)
    if kind == "W":
        return (Pass("B", microbatch, chunk),)
    if kind == "S":
        last, chunk = plan.stages[-1]
        return (Pass("F", microbatch, chunk) if rank == last else Comm("C0", microbatch),)
    if kind == "T":
        return (Pass("S", microbatch), Comm("C1", microbatch))
    if kind == "IB":
        first, chunk = plan.stages[0]
        gradient = Pass("B", microbatch, chunk) if rank == first else Comm("CIB", microbatch)
        return (Pass("IF", microbatch), gradient)
    return ()


def _forward_needs(plan: Plan, rank: int, item: Pass) -> tuple[Need, ...]:
    stage = plan.stage_of[rank, item.chunk]
    if stage == 0:
        return () if plan.barriers is None else (Comm("CIF", item.microbatch),)
    source, chunk = plan.stages[stage - 1]
    if source == rank:
        return (Pass("F", item.microbatch, chunk),)
    return (Comm("X", item.microbatch, stage - 1),)


def _backward_needs(plan: Plan, rank: int, item: Pass) -> tuple[Need, ...]:
    own = Pass("F", item.microbatch, item.chunk)
    stage = plan.stage_of[rank, item.chunk]
    if stage == len(plan.stages) - 1:
        if plan.barriers is None:
            return (own,)
        return (own, Comm("C1" if plan.barriers == 1 else "C2", item.microbatch))
    source, chunk = plan.stages[stage + 1]
    if source == rank:
        return (own, Pass("B", item.microbatch, chunk))
    return (own, Comm("G", item.microbatch, stage + 1))


def sources(plan: Plan, comm: Comm) -> tuple[tuple[int, Pass], ...]:
    """Return the (rank, pass) pairs whose results ``comm`` moves."""
    merged = _MERGED.get(comm.kind)
    if merged is not None:
        return tuple((rank, Pass(merged, comm.microbatch)) for rank in range(plan.ranks))
    stage = {"C0": len(plan.stages) - 1, "CIB": 0}.get(comm.kind, comm.stage)
    rank, chunk = plan.stages[stage]
    forward = comm.kind in ("X", "C0")
    return ((rank, Pass("F" if forward else "B", comm.microbatch, chunk)),)


def participants(plan: Plan, comm: Comm) -> tuple[int, ...]:
    """Return the ranks that take part: sender and receiver of X and G, else every rank."""
    if comm.kind == "X":
        return plan.stages[comm.stage][0], plan.stages[comm.stage + 1][0]
    if comm.kind == "G":
        return plan.stages[comm.stage][0], plan.stages[comm.stage - 1][0]
    return tuple(range(plan.ranks))
