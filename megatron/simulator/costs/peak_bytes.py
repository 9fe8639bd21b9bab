"""The most bytes that a rank holds while it works through its row."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite

from megatron.schedules.counted import counted
from megatron.schedules.held import held_changes
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan

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
    factors: Size | Sequence[Sequence[float]] | None = None
    repeated: Size | Sequence[Sequence[float]] = 0.0
    keys: Size | Sequence[Sequence[float]] = 0.0
    working: Mapping[PassKind, Size | Sequence[Sequence[float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, given in _given(self):
            for size in _flat(given):
                if not (isfinite(size) and size >= 0):
                    raise ValueError(f"{name}={size:g} is no size: give bytes, 0 or more")


def peak_bytes(plan: Plan, sizes: Sizes) -> list[float]:
    """Return for every rank the most bytes that it holds at any moment.

    Raises:
        ValueError: if ``sizes`` are for another number of ranks or chunks.
    """
    for name, size in _given(sizes):
        check_counts(name, "size", size, plan.ranks, plan.chunks)
    return [_peak(plan, sizes, rank) for rank in range(plan.ranks)]


def _peak(plan: Plan, sizes: Sizes, rank: int) -> float:
    """Return the peak of a rank; during a pass the rank holds both its inputs and its outputs."""
    known: dict[tuple[Pass, ...], tuple[float, float]] = {}
    held = most = _at(sizes.static, rank)
    for step in plan.steps(rank):
        alike = tuple(item._replace(microbatch=0) for item in step)
        if alike not in known:
            changes = [change for item in alike for change in _changes(plan, sizes, rank, item)]
            grows = sum(change for change in changes if change > 0)
            working = (_at(sizes.working.get(i.kind, 0.0), rank, i.chunk) for i in alike)
            known[alike] = grows + sum(working) / plan.slices, sum(changes)
        during, left = known[alike]
        most, held = max(most, held + during), held + left
    return most


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
