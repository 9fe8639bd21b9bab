"""Add the work that replicas do together (data parallelism) to a program, bucket by bucket.

A bucket is a group of parameters whose gradients are reduced together; RG is this reduction. A
bucket's gradients are complete after the last pass of the row that adds to any of them. So they
depend on all microbatches, and ``needs``, which describes one microbatch, cannot express this. RG
starts right after that pass, and runs while the remaining passes run. Ranks of one replica may also
hold summands of the same gradients: two stages with copies of a tied matrix, or tensor-parallel
ranks. RG adds up these summands first, so a program may have RG even without replicas.

With a sharded optimizer, each replica has the summed gradients of its own shard only. The replica
updates the parameters of this shard (U), and then all replicas gather the bucket (AG). U and AG
need the gradient norm of the whole model, so they stand at the beginning of the next iteration. The
bucket that is read first comes first, and only the first pass that reads a bucket waits for its AG.

Replicas run the same rows, so they issue RG, U and AG in the same order and at the same places. So
replicas cannot wait for each other in a circle, whatever the real times are. The two stages with
copies of a tied matrix run different rows, but they share only one bucket, and no pass waits for
this bucket.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from megatron.schedules.lower import Instruction, Program, Run, Start, Wait
from megatron.schedules.needs import Comm, CommKind
from megatron.schedules.passes import Pass, PassKind

Touch = tuple[PassKind, int]
"""Kind and chunk of a pass."""


@dataclass(frozen=True)
class Bucket:
    """Parameters of one pipeline rank whose gradients are reduced together.

    Attributes:
        after: all passes that add to the gradients.
        share: the bucket's share of all that the rank's buckets exchange: by size, and less if
            fewer ranks than usual have the same parameters.
        before: all passes that read the parameters.
        is_reduced: whether other ranks hold summands of the same gradients.
        gathered: as ``share``, of the bytes that ranks gather; ``None``: the same.
    """

    after: frozenset[Touch]
    share: float
    before: frozenset[Touch] = frozenset()
    is_reduced: bool = True
    gathered: float | None = None

    def share_of(self, kind: CommKind) -> float:
        """Return the bucket's share of all that the rank reduces (RG) or gathers (AG)."""
        return self.share if kind == "RG" or self.gathered is None else self.gathered


def reduction(rank: int, bucket: int) -> Comm:
    """Return the reduction of a bucket's gradients over the replicas of a pipeline rank."""
    return Comm("RG", bucket, rank)


def gathering(rank: int, bucket: int) -> Comm:
    """Return the gathering of a bucket's parameters from the replicas of a pipeline rank."""
    return Comm("AG", bucket, rank)


def with_reductions(
    program: Program, buckets: Sequence[Sequence[Bucket]], *, overlap: bool = True
) -> Program:
    """Return a program that reduces the gradients of every rank.

    Args:
        program: the program of a training iteration, without reductions.
        buckets: the buckets of every pipeline rank.
        overlap: whether each bucket is reduced as soon as its gradients are complete; otherwise all
            buckets are reduced after the last pass.
    """
    assert not program.shares, "the program reduces its gradients already"
    return _extended(program, buckets, partial(_with_reductions, overlap=overlap), reduction)


def _extended(
    program: Program,
    buckets: Sequence[Sequence[Bucket]],
    extend: Callable[[int, Sequence[Instruction], Sequence[Bucket]], tuple[Instruction, ...]],
    comm_of: Callable[[int, int], Comm],
) -> Program:
    """Return a program with extended rows, and with the shares of the new communications."""
    rows = tuple(
        extend(rank, row, own)
        for rank, (row, own) in enumerate(zip(program.rows, buckets, strict=True))
    )
    shares = dict(program.shares)
    for rank, own in enumerate(buckets):
        for number, bucket in enumerate(own):
            comm = comm_of(rank, number)
            if comm.kind != "RG" or bucket.is_reduced:
                shares[comm] = bucket.share_of(comm.kind)
    return replace(program, rows=rows, shares=shares)


def _with_reductions(
    rank: int, row: Sequence[Instruction], buckets: Sequence[Bucket], overlap: bool
) -> tuple[Instruction, ...]:
    complete: dict[int, list[Comm]] = defaultdict(list)
    places = _places(row)
    for number, bucket in enumerate(buckets):
        if not bucket.is_reduced:
            continue
        at = last_touch(places, bucket.after) if overlap else len(row) - 1
        complete[at].append(reduction(rank, number))
    made: list[Instruction] = []
    done = 0
    for index in sorted(complete):
        made += row[done : index + 1]
        made.extend(map(Start, complete[index]))
        done = index + 1
    made += row[done:]
    started = [comm for index in sorted(complete) for comm in complete[index]]
    # No pass reads the sums, so the waits stand at the end, in the order of the lane.
    return (*made, *map(Wait, started))


def with_updates(
    program: Program, buckets: Sequence[Sequence[Bucket]], *, overlap: bool = True
) -> Program:
    """Return a program that begins with the last iteration's update of the parameters.

    Args:
        program: the program of a training iteration, without updates.
        buckets: the buckets of every pipeline rank.
        overlap: whether a pass may run during a gathering whose parameters the pass does not read;
            otherwise the first pass comes after all gatherings.
    """
    return _extended(program, buckets, partial(_with_updates, overlap=overlap), gathering)


def _with_updates(
    rank: int, row: Sequence[Instruction], buckets: Sequence[Bucket], overlap: bool
) -> tuple[Instruction, ...]:
    places = _places(row)
    first_read = [_first_touch(places, bucket.before) for bucket in buckets]
    needed: dict[int, list[Comm]] = defaultdict(list)
    made: list[Instruction] = []
    for number in sorted(range(len(buckets)), key=first_read.__getitem__):
        comm = gathering(rank, number)
        # A bucket is gathered while the next one is updated.
        made += [Run(Pass("U", number)), Start(comm)]
        needed[first_read[number] if overlap else 0].append(comm)
    done = 0
    for index in sorted(needed):
        made += row[done:index]
        made.extend(map(Wait, needed[index]))
        done = index
    return (*made, *row[done:])


class Places(NamedTuple):
    """The places in a row of the first and of the last pass of a kind and chunk."""

    first: int
    last: int


def _places(row: Sequence[Instruction]) -> dict[Touch, Places]:
    """Return the places in a row of the passes of every kind and chunk."""
    first, last = dict[Touch, int](), dict[Touch, int]()
    for index, step in enumerate(row):
        if isinstance(step, Run):
            for item in step.passes:
                touch = item.kind, item.chunk
                first.setdefault(touch, index)
                last[touch] = index
    return {touch: Places(index, last[touch]) for touch, index in first.items()}


def last_touch(places: Mapping[Touch, Places], after: Iterable[Touch]) -> int:
    """Return the place of the last pass of the given kinds and chunks, at least one of the row."""
    return max(own.last for own in _of(places, after))


def _first_touch(places: Mapping[Touch, Places], before: Iterable[Touch]) -> int:
    """Return the place of the first pass of the given kinds and chunks, at least one of the row."""
    return min(own.first for own in _of(places, before))


def _of(places: Mapping[Touch, Places], touches: Iterable[Touch]) -> list[Places]:
    """Return the places of all passes of the given kinds and chunks, at least one."""
    wanted = frozenset(touches)
    found = [places[touch] for touch in wanted if touch in places]
    assert found, f"no pass of the row is one of {sorted(wanted)}"
    return found
