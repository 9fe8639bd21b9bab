"""The count of every pipeline rank of a run: each distinct part is counted once.

First, a rank is counted with a single layer in each chunk, or with a single group of layers that
the backward computes again together. All further layers are counted apart, once for each kind, and
their counts are added to the chunk as *segments*. So a hundred equal layers take no longer than one
layer. There is one exception: a chunk of which the backward computes only some layers again is
counted whole. Ranks with equal parts share a count. Of many slices only a few are counted
(``few_slices.py``).
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from megatron.layers.recompute import Recomputation
from megatron.model.parts import kind_of
from megatron.model.placement import Placement
from megatron.planning.count.apart import apart
from megatron.planning.count.few_slices import count_few
from megatron.planning.count.rank import CountedRank, Part
from megatron.planning.count.subject import Subject
from megatron.run.run_config import RunConfig
from megatron.schedules.lower import lower
from megatron.schedules.needs import CommKind
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.count import PassCount, RankCount, Segment

_CACHED = 512
"""Counts that a cache keeps; a dry run with all its advice needs some dozens."""

Counts = Mapping[tuple[CommKind, int], PassCount]


def count_ranks(config: RunConfig, plan: Plan, layers: Sequence[int]) -> list[RankCount]:
    """Return the work of every pipeline rank for one microbatch.

    The plan has one microbatch, and the passes and stages of the run's plan. If it cuts the
    microbatch into slices, every slice has a count: each reads another number of keys.
    """
    assert plan.microbatches == 1, "one microbatch is counted"
    subject = Subject.of(config, plan.slices)
    return apart(lambda: [_of_rank(subject, plan, layers, rank) for rank in range(plan.ranks)])


def count_layers(config: RunConfig, plan: Plan) -> list[Segment]:
    """Return the work of each layer of the model by itself; equal layers have the same object.

    The plan is as for ``count_ranks``.
    """
    subject = Subject.of(config, plan.slices)
    again = subject.recomputation.group > 0
    layers = [range(layer, layer + 1) for layer in range(config.model.num_layers)]
    kinds = [_kinds(subject, layer) for layer in layers]
    first = dict(zip(reversed(kinds), reversed(layers), strict=True))

    def counted() -> dict[tuple[Hashable, ...], Segment]:
        return {
            kind: _segment(subject, _LayersInARow(layer, again), plan)
            for kind, layer in first.items()
        }

    found = apart(counted)
    return [found[kind] for kind in kinds]


class _LayersInARow(NamedTuple):
    """Consecutive layers that are counted together.

    ``again``: the backward computes them again.
    """

    layers: range
    again: bool


@dataclass(frozen=True)
class _Keyed:
    """Arguments of a count; a cache compares only their ``key``.

    Arguments with equal counts have equal keys.
    """

    key: Hashable
    plan: Plan = field(compare=False)
    rank: int = field(compare=False)
    part: Part = field(compare=False)


def _of_rank(subject: Subject, plan: Plan, layers: Sequence[int], rank: int) -> RankCount:
    placement = subject.placement(plan, layers, rank)
    own: list[range] = []
    segments: dict[int, list[tuple[Segment, int]]] = {}
    for chunk, of_chunk in enumerate(placement.chunks):
        base, others = _divided(of_chunk, subject.recomputation)
        own.append(base)
        segments[chunk] = [
            (_segment(subject, part, plan), times) for part, times in _repeated(subject, others)
        ]
    part = Part(replace(placement, chunks=tuple(own)), subject.recomputation)
    keyed = _Keyed(role_of(subject, plan, rank, part.placement), plan, rank, part)
    known, whole = _whole_rank(subject, keyed)
    return _renumbered(whole, known, _own_stages(plan, rank)).with_segments(segments)


def _divided(layers: range, again: Recomputation) -> tuple[range, list[_LayersInARow]]:
    """Return the layers of a chunk to count with their rank, and the layers to count apart.

    The layers to count apart come first in the chunk. The layers of the rank have the recomputation
    of the run. So if recomputation ends within a chunk, all its layers are counted with the rank.
    """
    groups = [range(own[0], own[-1] + 1) for own in again.groups(layers)]
    rest = layers[sum(map(len, groups)) :]
    if groups and rest:
        return layers, []
    if groups:
        return groups[-1], [_LayersInARow(one, again=True) for one in groups[:-1]]
    return rest[-1:], [_LayersInARow(range(one, one + 1), again=False) for one in rest[:-1]]


def _repeated(
    subject: Subject, parts: Sequence[_LayersInARow]
) -> Iterator[tuple[_LayersInARow, int]]:
    """Yield each run of equal parts as its first part and its length."""
    for _, equal in groupby(parts, lambda part: (_kinds(subject, part.layers), part.again)):
        own = list(equal)
        yield own[0], len(own)


def _kinds(subject: Subject, layers: range) -> tuple[Hashable, ...]:
    """Return a key that is equal for layers with equal counts."""
    model, own = subject.model, subject.eight_bits
    return tuple(
        (kind_of(model, layer), own is not None and own.has(layer, model.num_layers))
        for layer in layers
    )


def _segment(subject: Subject, part: _LayersInARow, plan: Plan) -> Segment:
    """Count layers that have other layers before and after them.

    All work of such layers is within the graphs of their stage, if there are graphs. A graph has
    the launches of the layers, and the memory of the graph that of the layers' tensors.
    """
    if subject.captures:
        return _segment(subject._replace(captures=False), part, plan).captured("stage")
    kinds: list[PassKind] = ["F", "B"]
    if plan.recomputes:
        kinds.insert(1, "R")
    if plan.split_backward:
        kinds.append("W")
    row = tuple(Pass(kind, 0) for kind in kinds)
    stages = ((0, 0), (1, 0), (2, 0))
    between = Plan((row,) * 3, stages, 1, TREATMENTS["none"], slices=plan.slices)
    again = subject.recomputation
    if not part.again:
        again = replace(again, group=0, most=None)
    placement = Placement((part.layers,))
    key = (_kinds(subject, part.layers), part.again, row)
    return _counted_segment(subject, _Keyed(key, between, 1, Part(placement, again)))


@lru_cache(_CACHED)
def _counted_segment(subject: Subject, keyed: _Keyed) -> Segment:
    plan, rank = keyed.plan, keyed.rank
    return count_few(
        lambda slices: CountedRank(subject, plan, rank, keyed.part, slices, between=True).segment(),
        subject.slices,
    )


@lru_cache(_CACHED)
def _whole_rank(subject: Subject, keyed: _Keyed) -> tuple[tuple[int, ...], RankCount]:
    """Return the stages of a rank, and its count."""
    plan, rank = keyed.plan, keyed.rank
    program = lower(plan)
    count = count_few(
        lambda slices: CountedRank(subject, plan, rank, keyed.part, slices).count(program),
        subject.slices,
    )
    return _own_stages(plan, rank), count


def _own_stages(plan: Plan, rank: int) -> tuple[int, ...]:
    return tuple(plan.stage_of[rank, chunk] for chunk in range(plan.chunks))


def role_of(subject: Subject, plan: Plan, rank: int, placement: Placement) -> Hashable:
    """Return a key that is equal for ranks with equal counts, and with equal parameters."""
    stages, last = plan.stages, len(plan.stages) - 1

    def surroundings(stage: int) -> tuple[bool | None, ...]:
        before = None if stage == 0 else stages[stage - 1][0] == rank
        behind = None if stage == last else stages[stage + 1][0] == rank
        widths = plan.hands_on_predictions(stage - 1), plan.hands_on_predictions(stage)
        return before, behind, *widths

    shards = (placement.input_shard, placement.output_shard)
    return (
        plan.treatment.name,
        plan.split_backward,
        plan.recomputes,
        plan.ahead_stage is not None,
        plan.ranks,
        tuple(map(surroundings, _own_stages(plan, rank))),
        rank == stages[0][0],
        rank == stages[-1][0],
        tuple(_kinds(subject, layers) for layers in placement.chunks),
        tuple(None if shard is None else (shard.rows, shard.real_rows) for shard in shards),
    )


def _renumbered(count: RankCount, known: Sequence[int], own: Sequence[int]) -> RankCount:
    """Return a count for a rank with the stages ``own``; messages are named by stages."""
    if tuple(known) == tuple(own):
        return count
    # A receiver names a message by the sender's stage, which is just before or after its own.
    other: dict[CommKind, int] = {"X": -1, "G": 1}

    def renumber(counts: Counts) -> Counts:
        places = {
            (kind, stage + step): (kind, mine + step)
            for kind, away in other.items()
            for stage, mine in zip(known, own, strict=True)
            for step in (0, away)
        }
        return {places.get(key, key): one for key, one in counts.items()}

    slices = tuple(_renumbered(one, known, own) for one in count.slices)
    return replace(count, begun=renumber(count.begun), ended=renumber(count.ended), slices=slices)
