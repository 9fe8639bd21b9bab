"""How many bytes a rank holds at most while it works through its row."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from math import isfinite

from megatron.schedules.counted import counted
from megatron.schedules.held import held_changes, peak_held
from megatron.schedules.lower import Instruction, Program, Run, Start, Wait
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan

Size = float | Sequence[float]
"""Bytes: one number for all ranks, or one for each rank."""


@dataclass(frozen=True)
class Sizes:
    """Sizes in bytes of all that a rank holds: one number for all ranks, or one for each rank.

    Attributes:
        static: held at all times: parameters, gradients, optimizer states.
        activation: held for one chunk of one microbatch from F to B, or to W if it is a separate
            pass. The size of a rank may also be a sequence with one number for each chunk.
        exponentials: held for one microbatch from S to T.
        embedding: held for one microbatch from IF to the F of the rank's first chunk.
        partial: held for one microbatch from IF until the rank waits for CIF, which adds it up.
        ahead: held for one microbatch from IF to the F of the last stage, on its rank.
        factors: held for one chunk of one microbatch from B to W, if it is a separate pass;
            ``None``: as ``activation``. Layers that B computes again hold more for W than for B.
        repeated: held for one chunk of one microbatch from R to B, beside ``activation``.
        room: for one microbatch's exponentials. What is never given back, but reused: held at all
            times for as many microbatches as there are between S and T at most; without such
            passes, between F and the end of the backward on the last stage.
        afterwards: held after the last pass, beside what is held at all times.
        output: of the last stage, held for one microbatch on its rank from F to S, on others from
            the start of C0 to S.
        gradient: of the output layer's input, held for one microbatch from the pass that forms it
            to the B of the last stage, on other ranks until they wait for the barrier that adds
            it up.
        looked_up: gradient of embeddings, held for one microbatch from the B of the first stage to
            IB, and again from that of a last stage that reads ahead; on other ranks from the start
            of CIB.
        working: by kind of pass, what is held while one runs.

    Raises:
        ValueError: if a size is negative, infinite or no number.
    """

    static: Size = 0.0
    activation: Size | Sequence[Sequence[float]] = 0.0
    exponentials: Size = 0.0
    embedding: Size = 0.0
    ahead: Size = 0.0
    factors: Size | Sequence[Sequence[float]] | None = None
    repeated: Size | Sequence[Sequence[float]] = 0.0
    afterwards: Size = 0.0
    partial: Size = 0.0
    room: Size = 0.0
    output: Size = 0.0
    gradient: Size = 0.0
    looked_up: Size = 0.0
    working: Mapping[PassKind, Size | Sequence[Sequence[float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, given in _given(self):
            for size in _flat(given):
                if not (isfinite(size) and size >= 0):
                    raise ValueError(f"{name}={size:g} is no size: give bytes, 0 or more")


def peak_bytes(done: Plan | Program, sizes: Sizes) -> list[float]:
    """Return for every rank the most bytes that it holds at any moment.

    Args:
        done: the program; or a plan, which does not say when a rank waits for what it has sent and
            receives, so that what is held meanwhile counts for nothing.
        sizes: sizes of what is held.

    Raises:
        ValueError: if ``sizes`` are for another number of ranks or chunks.
    """
    plan = done if isinstance(done, Plan) else done.plan
    for name, size in _given(sizes):
        _check_counts(plan, name, size)
    return [_peak(done, sizes, rank) for rank in range(plan.ranks)]


def held_bytes(done: Plan | Program, sizes: Sizes, rank: int) -> Iterator[tuple[float, float]]:
    """Yield for every pass of ``rank``, in order, the bytes held during it and after it.

    A pass holds its inputs and its outputs at the same time.

    Args: as those of ``peak_bytes``.
    """
    if isinstance(done, Plan):
        plan, sizes = done, _without_waiting(done, sizes)
        row: Iterable[Instruction] = map(Run, done.rows[rank])
    else:
        plan, row = done.plan, done.rows[rank]
    grows: dict[Pass, float] = {}
    shrinks: dict[Pass, float] = {}
    working: dict[Pass, float] = {}
    held = _at_rest(plan, sizes, rank)
    for step in row:
        if not isinstance(step, Run):
            held += _change_by_communication(plan, sizes, rank, step)
            continue
        alike = step.item._replace(microbatch=0)
        if alike not in grows:
            changes = _changes(plan, sizes, rank, alike)
            grows[alike] = sum(change for change in changes if change > 0)
            shrinks[alike] = sum(change for change in changes if change < 0)
            working[alike] = _at(sizes.working.get(alike.kind, 0.0), rank, alike.chunk)
        during = held + grows[alike] + working[alike]
        held += grows[alike] + shrinks[alike]
        yield during, held


def _without_waiting(plan: Plan, sizes: Sizes) -> Sizes:
    """Leave out what only a program says for how long it is held."""
    last = plan.stages[-1][0]

    def on_last(size: Size) -> list[float]:
        return [_at(size, rank) * (rank == last) for rank in range(plan.ranks)]

    output, gradient = on_last(sizes.output), on_last(sizes.gradient)
    return replace(sizes, partial=0.0, output=output, gradient=gradient, looked_up=0.0)


def _change_by_communication(plan: Plan, sizes: Sizes, rank: int, step: Start | Wait) -> float:
    """Return the change in what is sent until it has arrived, and in what is received."""
    kind = step.comm.kind
    if isinstance(step, Start):
        if kind == "CIB":
            elsewhere = sum(end != rank for end, _ in _embedding_ends(plan, sizes))
            return elsewhere * _at(sizes.looked_up, rank)
        receives = kind == "C0" and rank != plan.stages[-1][0]
        return receives * _at(sizes.output, rank)
    if kind == "CIF":
        return -_at(sizes.partial, rank)
    summed = any(
        kind == each.kind and "gradient" in each.carries for each in plan.treatment.barriers
    )
    return -(summed and rank != plan.stages[-1][0]) * _at(sizes.gradient, rank)


def _peak(done: Plan | Program, sizes: Sizes, rank: int) -> float:
    plan = done if isinstance(done, Plan) else done.plan
    at_rest = _at_rest(plan, sizes, rank) + _at(sizes.afterwards, rank)
    return max([at_rest, *(during for during, _ in held_bytes(done, sizes, rank))])


def _at_rest(plan: Plan, sizes: Sizes, rank: int) -> float:
    """Return the bytes that a rank holds at all times."""
    static, room = _at(sizes.static, rank), _at(sizes.room, rank)
    return static + room * _microbatches_with_room(plan, rank) if room else static


def _microbatches_with_room(plan: Plan, rank: int) -> float:
    """Return how many microbatches of a rank have exponentials at a time."""
    if plan.treatment.is_sharded:
        return peak_held(plan, plan.rows[rank]).exponentials
    end = "W" if plan.split_backward else "B"
    held = accumulate(
        (item.kind == "F") - (item.kind == end)
        for item in plan.rows[rank]
        if (rank, item.chunk) == plan.stages[-1]
    )
    return max(held, default=0)


def _changes(plan: Plan, sizes: Sizes, rank: int, item: Pass) -> tuple[float, ...]:
    held = held_changes(plan, item)
    return (
        _activation_change(plan, sizes, rank, item),
        held.exponentials * _at(sizes.exponentials, rank),
        held.embeddings * _at(sizes.embedding, rank),
        (item.kind == "IF") * _at(sizes.partial, rank),
        _looking_ahead(plan, rank, item) * _at(sizes.ahead, rank),
        *_of_output_layer(plan, sizes, rank, item),
        _looked_up(plan, sizes, rank, item) * _at(sizes.looked_up, rank),
    )


def _of_output_layer(plan: Plan, sizes: Sizes, rank: int, item: Pass) -> tuple[float, float]:
    """Return the changes in outputs of the last stage, and in their gradients."""
    if not plan.treatment.is_sharded:
        return 0.0, 0.0
    here = (rank, item.chunk) == plan.stages[-1]
    output = (item.kind == "F" and here) - (item.kind == "S")
    gradient = (item.kind == plan.treatment.gradient_pass) - (item.kind == "B" and here)
    return output * _at(sizes.output, rank), gradient * _at(sizes.gradient, rank)


def _looked_up(plan: Plan, sizes: Sizes, rank: int, item: Pass) -> int:
    """Return the change in gradients of embeddings that IB has not added."""
    if not plan.treatment.is_sharded:
        return 0
    ends = _embedding_ends(plan, sizes)
    begun = ends.count((rank, item.chunk)) if item.kind == "B" else 0
    return begun - len(ends) * (item.kind == "IB")


def _embedding_ends(plan: Plan, sizes: Sizes) -> list[tuple[int, int]]:
    """Return the stages that read embeddings: the first, and a last one that reads ahead."""
    return [plan.stages[0]] + ([plan.stages[-1]] if any(_flat(sizes.ahead)) else [])


def _looking_ahead(plan: Plan, rank: int, item: Pass) -> int:
    """Return the change in microbatches whose embeddings the last stage has still to read ahead."""
    is_reader = item.kind == "F" and (rank, item.chunk) == plan.stages[-1]
    return (item.kind == "IF") - (is_reader and plan.treatment.is_sharded)


def _activation_change(plan: Plan, sizes: Sizes, rank: int, item: Pass) -> float:
    """Return the change in what F and R leave for B, and B for W."""
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


def _check_counts(plan: Plan, name: str, size: Size | Sequence[Sequence[float]]) -> None:
    if isinstance(size, (int, float)):
        return
    if len(size) != plan.ranks:
        raise ValueError(
            f"{name} has {counted(len(size), 'size')} for {counted(plan.ranks, 'rank')}: "
            "give one, or one for each rank"
        )
    for own in size:
        if not isinstance(own, (int, float)) and len(own) != plan.chunks:
            raise ValueError(
                f"{name} has {counted(len(own), 'size')} for "
                f"{counted(plan.chunks, 'chunk of a rank')}: give one, or one for each chunk"
            )
