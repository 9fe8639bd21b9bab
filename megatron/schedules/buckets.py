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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

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
    begun = [frozenset(step.comm for step in row if isinstance(step, Start)) for row in rows]
    shares = {
        comm_of(rank, number): bucket.share_of(comm_of(rank, number).kind)
        for rank, own in enumerate(buckets)
        for number, bucket in enumerate(own)
        if comm_of(rank, number) in begun[rank]
    }
    return replace(program, rows=rows, shares={**program.shares, **shares})


def _with_reductions(
    rank: int, row: Sequence[Instruction], buckets: Sequence[Bucket], overlap: bool
) -> tuple[Instruction, ...]:
    complete: dict[int, list[Comm]] = defaultdict(list)
    for number, bucket in enumerate(buckets):
        if not bucket.is_reduced:
            continue
        at = last_touch(row, bucket.after) if overlap else len(row) - 1
        complete[at].append(reduction(rank, number))
    made: list[Instruction] = []
    for index, step in enumerate(row):
        made.append(step)
        made.extend(map(Start, complete[index]))
    started = [comm for index in sorted(complete) for comm in complete[index]]
    return (*made, *map(Wait, started))


def last_touch(row: Sequence[Instruction], after: Iterable[Touch]) -> int:
    """Return the place of the last pass of the given kinds and chunks in a row."""
    return _places(row, after)[-1]


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
    first_read = [_places(row, bucket.before)[0] for bucket in buckets]
    needed: dict[int, list[Comm]] = defaultdict(list)
    made: list[Instruction] = []
    for number in sorted(range(len(buckets)), key=first_read.__getitem__):
        comm = gathering(rank, number)
        made += [Run(Pass("U", number)), Start(comm)]
        needed[first_read[number] if overlap else 0].append(comm)
    for index, step in enumerate(row):
        made.extend(map(Wait, needed[index]))
        made.append(step)
    return tuple(made)


def _places(row: Sequence[Instruction], touches: Iterable[Touch]) -> list[int]:
    """Return the places in a row of all passes of the given kinds and chunks, at least one."""
    wanted = frozenset(touches)
    places = [
        index
        for index, step in enumerate(row)
        if isinstance(step, Run) and any((item.kind, item.chunk) in wanted for item in step.passes)
    ]
    assert places, f"no pass of the row is one of {sorted(wanted)}"
    return places
