"""The most bytes that a rank holds while it works through its row, from sizes of its tensors.

Sizes become counts of passes, as the code's own count has them. ``rank_memory`` walks the row.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite

from megatron.schedules.counted import counted
from megatron.schedules.held import held_changes
from megatron.schedules.lower import Program
from megatron.schedules.needs import CommKind
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan
from megatron.simulator.costs.count import PassCount, RankCount
from megatron.simulator.costs.rank_memory import RankMemory, peaks

Size = float | Sequence[float]
"""Bytes: one number for all ranks, or one for each rank."""


@dataclass(frozen=True)
class Sizes:
    """Sizes in bytes of all that a rank holds: one number for all ranks, or one for each rank.

    Attributes:
        static: held at all times: parameters, gradients, optimizer states.
        activation: held for one chunk of one microbatch from F to B, or to W if W is a separate
            pass and ``factors`` is ``None``. The size of a rank may also be a sequence with one
            number for each chunk.
        exponentials: held for one microbatch from S to T.
        embedding: held for one microbatch from IF to the F of the rank's first chunk.
        embedding_gradient: held for one microbatch until IB, and until the rank no longer waits for
            the gradient's broadcast: by the rank of the first stage from the B of this stage, by
            other ranks from the begin of the broadcast.
        factors: held for one chunk of one microbatch from B to W, if W is a separate pass;
            ``None``: the same as ``activation``. If B computes layers again, more is held from B to
            W than from F to B.
        repeated: held for one chunk of one microbatch from R to B, beside ``activation``.
        keys: keys and values of one chunk of one microbatch, if it is cut into slices: later slices
            read them. They are held beside ``activation`` from the F of the first slice to its B.
            From the first B of the microbatch on, their gradients are held too.
        working: held while a pass runs, by kind of pass.

    If microbatches are cut into n slices, a slice has an n-th of each of these sizes.

    Raises:
        ValueError: if a size is negative, infinite or no number.
    """

    static: Size = 0.0
    activation: Size | Sequence[Sequence[float]] = 0.0
    exponentials: Size = 0.0
    embedding: Size = 0.0
    embedding_gradient: Size = 0.0
    factors: Size | Sequence[Sequence[float]] | None = None
    repeated: Size | Sequence[Sequence[float]] = 0.0
    keys: Size | Sequence[Sequence[float]] = 0.0
    working: Mapping[PassKind, Size | Sequence[Sequence[float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, given in _given(self):
            for size in _flat(given):
                if not (isfinite(size) and size >= 0):
                    raise ValueError(f"{name}={size:g} is no size: give bytes, 0 or more")


def peak_bytes(program: Program, sizes: Sizes) -> list[float]:
    """Return for every rank the most bytes that it holds at any moment.

    Raises:
        ValueError: if ``sizes`` are for another number of ranks or chunks.
    """
    plan = program.plan
    for name, size in _given(sizes):
        check_counts(name, "size", size, plan.ranks, plan.chunks)
    memories = [
        RankMemory(_counted(plan, sizes, rank), _at(sizes.static, rank))
        for rank in range(plan.ranks)
    ]
    return peaks(program, memories)


def _counted(plan: Plan, sizes: Sizes, rank: int) -> RankCount:
    """Return the bytes of a rank's passes and of the broadcast of embeddings' gradients."""
    passes: list[dict[tuple[PassKind, int], PassCount]] = [{} for _ in range(plan.slices)]
    for item in {item._replace(microbatch=0) for item in plan.rows[rank]}:
        passes[item.slice][item.kind, item.chunk] = _pass(plan, sizes, rank, item)
    begun: dict[tuple[CommKind, int], PassCount] = {}
    if rank != plan.stages[0][0]:
        gradient = _at(sizes.embedding_gradient, rank) / plan.slices
        begun["CIB", 0] = PassCount(left=gradient, peak=gradient)
    slices = [RankCount(own, begun) for own in passes]
    return slices[0] if plan.slices == 1 else RankCount({}, slices=slices)


def _pass(plan: Plan, sizes: Sizes, rank: int, item: Pass) -> PassCount:
    """Return the bytes of a pass. While it runs, the rank holds its inputs and its outputs.

    Only the gradient of embeddings is formed so late that other tensors of B are gone by then.
    """
    changes = _changes(plan, sizes, rank, item)
    working = _at(sizes.working.get(item.kind, 0.0), rank, item.chunk) / plan.slices
    left = sum(changes) + _gradient_change(plan, sizes, rank, item) / plan.slices
    return PassCount(left=left, peak=max(left, working + sum(own for own in changes if own > 0)))


def _gradient_change(plan: Plan, sizes: Sizes, rank: int, item: Pass) -> float:
    """Return the change of the bytes of embeddings' gradients by a pass.

    B of the first stage leaves a gradient, and IB frees it.
    """
    if not plan.treatment.is_sharded:
        return 0.0
    leaves = item.kind == "B" and (rank, item.chunk) == plan.stages[0]
    return (leaves - (item.kind == "IB")) * _at(sizes.embedding_gradient, rank)


def _changes(plan: Plan, sizes: Sizes, rank: int, item: Pass) -> tuple[float, ...]:
    held, n = held_changes(plan, item), plan.slices
    return (
        _activation_change(plan, sizes, rank, item) / n,
        held.exponentials * _at(sizes.exponentials, rank) / n,
        held.embeddings * _at(sizes.embedding, rank) / n,
        _keys_held(plan, item) * _at(sizes.keys, rank, item.chunk),
    )


def _keys_held(plan: Plan, item: Pass) -> int:
    """Return how a pass changes the number of buffers of keys and values of its microbatch.

    The F of the first slice makes the buffer. The first B, that of the last slice, makes one for
    the gradients. The last B frees both.
    """
    if plan.slices == 1:
        return 0
    first, last = item.slice == 0, item.slice == plan.slices - 1
    return {"F": int(first), "B": last - 2 * first}.get(item.kind, 0)


def _activation_change(plan: Plan, sizes: Sizes, rank: int, item: Pass) -> float:
    """Return the change of the bytes of a chunk by a pass.

    F and R leave tensors for B, and B leaves tensors for W. The bytes belong to ``activation``,
    ``factors`` and ``repeated``.
    """
    kept = _at(sizes.activation, rank, item.chunk)
    factors = kept if sizes.factors is None else _at(sizes.factors, rank, item.chunk)
    left = factors if plan.split_backward else 0.0
    again = _at(sizes.repeated, rank, item.chunk) if plan.recomputes else 0.0
    changes = {"F": kept, "R": again, "B": left - kept - again, "W": -left}
    return changes.get(item.kind, 0.0)


def _given(sizes: Sizes) -> Iterator[tuple[str, Size | Sequence[Sequence[float]]]]:
    """Yield every size that is given, with its name."""
    for own in fields(sizes):
        size = getattr(sizes, own.name)
        if own.name == "working":
            yield from size.items()
        elif size is not None:
            yield own.name, size


def _at(size: Size | Sequence[Sequence[float]], rank: int, chunk: int = 0) -> float:
    own = size if isinstance(size, (int, float)) else size[rank]
    return own if isinstance(own, (int, float)) else own[chunk]


def _flat(size: Size | Sequence[Sequence[float]]) -> list[float]:
    if isinstance(size, (int, float)):
        return [size]
    return [value for part in size for value in _flat(part)]


def check_counts(
    name: str,
    noun: str,
    given: Size | Sequence[Sequence[float]],
    ranks: int,
    chunks: int | None = None,
) -> None:
    """Check that there is one number, one for each rank, or one for each chunk of each rank.

    Args:
        name: the name of the numbers.
        noun: the noun for each number.
        given: the numbers.
        ranks: pipeline ranks.
        chunks: chunks of a rank; ``None`` if their number is not known yet.

    Raises:
        ValueError: if the numbers are for other ranks or chunks.
    """
    if isinstance(given, (int, float)):
        return
    if len(given) != ranks:
        raise ValueError(
            f"{name} has {counted(len(given), noun)} for {counted(ranks, 'rank')}: give one, or "
            "one for each rank"
        )
    for own in given:
        if chunks is not None and not isinstance(own, (int, float)) and len(own) != chunks:
            raise ValueError(
                f"{name} has {counted(len(own), noun)} for {counted(chunks, 'chunk of a rank')}: "
                "give one, or one for each chunk"
            )
