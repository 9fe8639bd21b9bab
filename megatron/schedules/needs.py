"""What a pass needs before it may start: the only place that knows the dependencies.

A need is either an earlier pass of the same rank or a communication. A communication in turn has
sources, the passes whose results it moves, and participants, the ranks that take part. Checking,
lowering, simulating and executing all ask here.
"""

from typing import Final, Literal, NamedTuple, get_args

from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan

CommKind = Literal["X", "G", "C0", "C1", "C2", "C3", "CIF", "CIB"]
"""X activation to the next stage, G gradient to the previous one; C0 broadcast of the last stage's
output, C1 to C3 the barriers of the output layer (DESIGN section 3); CIF reduction of the input
embedding to the first stage, CIB broadcast of its gradient from there."""

COMM_KINDS: Final[tuple[CommKind, ...]] = get_args(CommKind)
_BARRIERS: Final[dict[int, dict[CommKind, PassKind]]] = {
    1: {"C1": "S"},
    2: {"C1": "S", "C2": "T"},
    3: {"C1": "S", "C2": "E", "C3": "T"},
}
"""The barriers of the output layer in order, and the pass that each rank contributes to each. The
backward waits for the last; the passes after S wait for the barrier of the pass before them, T of
one barrier for the only one."""


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
        return _output_needs(plan, rank, microbatch)
    if kind in ("E", "T"):
        barrier, merged = _barrier_before(plan, kind)
        return (Pass(merged, microbatch), Comm(barrier, microbatch))
    if kind == "IB":
        first, chunk = plan.stages[0]
        gradient = Pass("B", microbatch, chunk) if rank == first else Comm("CIB", microbatch)
        return (Pass("IF", microbatch), gradient)
    return ()


def _output_needs(plan: Plan, rank: int, microbatch: int) -> tuple[Need, ...]:
    """Return what S waits for: the output of the last stage, which has it without a broadcast.

    Where ranks meet for the output layer, the last stage waits for the others too.
    """
    last, chunk = plan.stages[-1]
    own: tuple[Need, ...] = (Pass("F", microbatch, chunk),) if rank == last else ()
    return own if own and not plan.synchronous else (*own, Comm("C0", microbatch))


def _barrier_before(plan: Plan, kind: PassKind) -> tuple[CommKind, PassKind]:
    """Return the barrier that an output layer pass after S waits for, and what it merges."""
    chain = list(_BARRIERS[plan.barriers or 0].items())
    own = next((i for i, (_, merged) in enumerate(chain) if merged == kind), len(chain))
    return chain[own - 1]


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
        return (own, Comm(list(_BARRIERS[plan.barriers])[-1], item.microbatch))
    source, chunk = plan.stages[stage + 1]
    if source == rank:
        return (own, Pass("B", item.microbatch, chunk))
    return (own, Comm("G", item.microbatch, stage + 1))


def sources(plan: Plan, comm: Comm) -> tuple[tuple[int, Pass], ...]:
    """Return the (rank, pass) pairs whose results ``comm`` moves."""
    barriers = _BARRIERS.get(plan.barriers or 0, {})
    merged = "IF" if comm.kind == "CIF" else barriers.get(comm.kind)
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
