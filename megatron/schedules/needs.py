"""The needs of a pass: all that must be done before it starts. Only this file knows them.

A need is either an earlier pass of the same rank or a communication. A communication has sources
(the passes whose results it moves) and participants (the ranks that take part). The check, the
lowering, the simulator and the executor all use these functions.
"""

from typing import Final, Literal, NamedTuple, get_args

from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan
from megatron.schedules.treatments import BarrierKind

CommKind = Literal["X", "G", "C0", BarrierKind, "CIF", "CIB", "RG", "AG", "O", "L"]
"""X activation to the next stage, G gradient to the previous one; C0 broadcast of the last stage's
output, C1 to C3 the barriers of the output layer (``TREATMENTS``); CIF reduction of the input
embedding to the first stage, CIB broadcast of the embedding's gradient from there; a stage that
looks ahead takes part in CIF and CIB like the first. RG reduction of a bucket of gradients over
the replicas; AG gathering of a bucket of updated parameters from the replicas.
``buckets`` places RG and AG. O copies the tensors that an F has left for its backward to the host,
and L brings them back; ``offload`` places O and L."""

COMM_KINDS: Final[tuple[CommKind, ...]] = get_args(CommKind)
STAGE_KINDS: Final = ("X", "G")
"""Messages from stage to stage."""

REPLICA_KINDS: Final = ("RG", "AG")
"""Communications with the other replicas, each of one pipeline rank."""

HOST_KINDS: Final = ("O", "L")
"""Copies between a rank and its host."""


class Comm(NamedTuple):
    """One communication.

    Attributes:
        kind: the kind of data that it moves.
        microbatch: the microbatch that the communication belongs to; for RG and AG, the number of
            the bucket.
        stage: the sending stage of X and G, the pipeline rank of RG and AG, the stage whose tensors
            O and L copy; 0 for the others.
        slice: the slice of the microbatch; 0 for RG and AG.
    """

    kind: CommKind
    microbatch: int
    stage: int = 0
    slice: int = 0

    def __str__(self) -> str:
        """Return a readable name: ``C1 3/2``, ``X3 from 0`` (a stage), ``RG 3 of 0`` (a rank)."""
        unit = f"{self.microbatch}" + (f"/{self.slice}" if self.slice else "")
        if self.kind in ("X", "G"):
            return f"{self.kind}{unit} from {self.stage}"
        if self.kind in (*REPLICA_KINDS, *HOST_KINDS):
            return f"{self.kind} {unit} of {self.stage}"
        return f"{self.kind} {unit}"


Need = Pass | Comm


def needs(plan: Plan, rank: int, item: Pass) -> tuple[Need, ...]:
    """Return the passes of ``rank`` and the communications that ``item`` waits for there.

    Every need is of the same slice, with two exceptions. F reads the keys and values that the F of
    the slice before it has left, and B needs the gradients of its own keys and values, to which the
    B of the slice after it adds.
    """
    kind = item.kind
    if kind == "F":
        return (*_forward_needs(plan, rank, item), *_neighbour(plan, item, -1))
    if kind == "R":
        return (item._replace(kind="F"),)
    if kind == "B":
        return (*_backward_needs(plan, rank, item), *_neighbour(plan, item, 1))
    if kind == "W":
        return (item._replace(kind="B"),)
    if kind == "S":
        return _output_needs(plan, rank, item)
    if kind in ("E", "T"):
        barrier = plan.treatment.barrier_before(kind)
        return (item._replace(kind=barrier.after), _comm(barrier.kind, item))
    if kind == "IB":
        return (item._replace(kind="IF"), *_gradients_of_embeddings(plan, rank, item))
    return ()


def _comm(kind: CommKind, item: Pass, stage: int = 0) -> Comm:
    """Return the communication of the microbatch and the slice of a pass."""
    return Comm(kind, item.microbatch, stage, item.slice)


def _neighbour(plan: Plan, item: Pass, step: int) -> tuple[Pass, ...]:
    """Return the same pass of the slice after ``item`` (step 1) or before it (-1), if any."""
    other = item.slice + step
    return (item._replace(slice=other),) if 0 <= other < plan.slices else ()


def _gradients_of_embeddings(plan: Plan, rank: int, item: Pass) -> tuple[Need, ...]:
    """Return the needs of IB: the B of stages that read embeddings, or the gradient's broadcast."""
    readers = plan.readers
    own = tuple(item._replace(kind="B", chunk=chunk) for reader, chunk in readers if reader == rank)
    return own if len(own) == len(readers) else (*own, _comm("CIB", item))


def _output_needs(plan: Plan, rank: int, item: Pass) -> tuple[Need, ...]:
    """Return the needs of S: the output of the last stage.

    The rank of the last stage has this output already; the others wait for its broadcast C0. If
    the output layer is synchronous, the rank of the last stage waits for C0 too.
    """
    last, chunk = plan.stages[-1]
    own: tuple[Need, ...] = (item._replace(kind="F", chunk=chunk),) if rank == last else ()
    return own if own and not plan.treatment.synchronous else (*own, _comm("C0", item))


def _forward_needs(plan: Plan, rank: int, item: Pass) -> tuple[Need, ...]:
    stage = plan.stage_of[rank, item.chunk]
    reads = plan.treatment.is_sharded and (rank, item.chunk) in plan.readers
    embeddings = (_comm("CIF", item),) if reads else ()
    if stage == 0:
        return embeddings
    source, chunk = plan.stages[stage - 1]
    if source == rank:
        return (item._replace(chunk=chunk), *embeddings)
    return (_comm("X", item, stage - 1), *embeddings)


def _backward_needs(plan: Plan, rank: int, item: Pass) -> tuple[Need, ...]:
    own = item._replace(kind="R" if plan.recomputes else "F")
    stage = plan.stage_of[rank, item.chunk]
    if stage == len(plan.stages) - 1:
        # The last barrier is enough: its pass waits for the barrier before it.
        return (own, *(_comm(last.kind, item) for last in plan.treatment.barriers[-1:]))
    source, chunk = plan.stages[stage + 1]
    if source == rank:
        return (own, item._replace(chunk=chunk))
    return (own, _comm("G", item, stage + 1))


def sources(plan: Plan, comm: Comm) -> tuple[tuple[int, Pass], ...]:
    """Return the (rank, pass) pairs whose results ``comm`` moves."""

    def source(kind: PassKind, chunk: int = 0) -> Pass:
        return Pass(kind, comm.microbatch, chunk, comm.slice)

    after: dict[CommKind, PassKind] = {b.kind: b.after for b in plan.treatment.barriers}
    after["CIF"] = "IF"
    if comm.kind in after:
        everywhere = source(after[comm.kind])
        return tuple((rank, everywhere) for rank in range(plan.ranks))
    if comm.kind == "CIB":
        return tuple((rank, source("B", chunk)) for rank, chunk in plan.readers)
    rank, chunk = plan.stages[-1 if comm.kind == "C0" else comm.stage]
    forward = comm.kind in ("X", "C0", *HOST_KINDS)
    return ((rank, source("F" if forward else "B", chunk)),)


def participants(plan: Plan, comm: Comm) -> tuple[int, ...]:
    """Return the pipeline ranks that take part in ``comm``.

    For X and G these are the sender and the receiver; for RG and AG, the rank that the bucket
    belongs to; for O and L, the rank of the stage; for other kinds, all ranks.
    """
    if comm.kind in REPLICA_KINDS:
        return (comm.stage,)
    if comm.kind in HOST_KINDS:
        return (plan.stages[comm.stage][0],)
    if comm.kind == "X":
        return plan.stages[comm.stage][0], plan.stages[comm.stage + 1][0]
    if comm.kind == "G":
        return plan.stages[comm.stage][0], plan.stages[comm.stage - 1][0]
    return tuple(range(plan.ranks))
