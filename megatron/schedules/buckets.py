"""Adds the reduction of gradients over replicas (data parallelism) to a program.

A rank reduces its gradients in buckets. A bucket's gradients are complete after the last pass of
the row that adds to any of them, so they depend on all microbatches, and not through ``needs``. RG
starts right there, and runs beside the passes that are left. Replicas run the same rows, so they
issue their reductions in the same order, at the same places: no real timing can make them wait for
each other in a circle.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron.schedules.lower import Instruction, Program, Run, Start, Wait
from megatron.schedules.needs import Comm
from megatron.schedules.passes import PassKind


@dataclass(frozen=True)
class Bucket:
    """Gradients of one pipeline rank that are reduced together.

    Attributes:
        after: kind and chunk of all passes that add to them.
        share: of all gradients of the rank, by size.
    """

    after: frozenset[tuple[PassKind, int]]
    share: float


def reduction(rank: int, bucket: int) -> Comm:
    """Return the reduction of a bucket of a pipeline rank over its replicas."""
    return Comm("RG", bucket, rank)


def with_reductions(
    program: Program, buckets: Sequence[Sequence[Bucket]], *, overlap: bool = True
) -> Program:
    """Return a program that reduces the gradients of every rank.

    Args:
        program: of a training iteration, without reductions.
        buckets: of every pipeline rank.
        overlap: whether a bucket is reduced as soon as its gradients are complete; otherwise all
            are reduced after the last pass.
    """
    assert not program.shares, "the program reduces its gradients already"
    rows = tuple(
        _with_reductions(rank, row, own, overlap)
        for rank, (row, own) in enumerate(zip(program.rows, buckets, strict=True))
    )
    shares = {
        reduction(rank, number): bucket.share
        for rank, own in enumerate(buckets)
        for number, bucket in enumerate(own)
    }
    return replace(program, rows=rows, shares=shares)


def _with_reductions(
    rank: int, row: Sequence[Instruction], buckets: Sequence[Bucket], overlap: bool
) -> tuple[Instruction, ...]:
    complete: dict[int, list[Comm]] = defaultdict(list)
    for number, bucket in enumerate(buckets):
        at = last_touch(row, bucket.after) if overlap else len(row) - 1
        complete[at].append(reduction(rank, number))
    made: list[Instruction] = []
    for index, step in enumerate(row):
        made.append(step)
        made.extend(map(Start, complete[index]))
    started = [comm for index in sorted(complete) for comm in complete[index]]
    return (*made, *map(Wait, started))


def last_touch(row: Sequence[Instruction], after: Iterable[tuple[PassKind, int]]) -> int:
    """Return the place in a row of its last pass of the given kinds and chunks."""
    touching = frozenset(after)
    places = [
        index
        for index, step in enumerate(row)
        if isinstance(step, Run) and (step.item.kind, step.item.chunk) in touching
    ]
    assert places, f"no pass of the row is one of {sorted(touching)}"
    return places[-1]
