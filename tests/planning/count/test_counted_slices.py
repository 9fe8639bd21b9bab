"""Slices of a microbatch are counted one by one: together they do the work of the whole."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import pytest
from planning.count.counting import LLAMA, plan_of, run_of
from planning.count.test_composition import facts

from megatron.layers.recompute import Recomputation
from megatron.planning.count.rank import CountedRank, Part
from megatron.planning.count.recorder import GRANULE
from megatron.planning.count.run import count_ranks
from megatron.planning.count.subject import Subject
from megatron.run.run_config import RunConfig
from megatron.schedules.lower import lower
from megatron.schedules.passes import PassKind
from megatron.schedules.plan import Plan
from megatron.schedules.settings import SliceSettings
from megatron.schedules.slice_lengths import SliceStrategy
from megatron.simulator.costs.count import PassCount
from megatron.simulator.costs.counted_costs import BY_FLOPS, costs_of

SLICES = 4
LENGTH = 1024
LAYERS = [2, 1]
BOTH: Final[tuple[PassKind, ...]] = ("F", "B")
MODEL = replace(LLAMA, num_layers=3, seq_length=LENGTH)


def sliced(
    treatment: str = "vocab-2", schedule: str = "1f1b", slices: int = SLICES, **train: Any
) -> tuple[RunConfig, Plan]:
    run = run_of(MODEL, treatment, 2, sizes={"slices": SliceSettings(slices)}, **train)
    return run, plan_of(run, schedule, slices=slices)


def executed(counts: Sequence[PassCount]) -> int:
    """Return the FLOPs that GPUs do in passes."""
    return sum(
        times * sum(launch.executed for launch in work.launches)
        for count in counts
        for work, times in count.parts
    )


@pytest.mark.parametrize(
    ("treatment", "schedule", "group"),
    [("vocab-2", "zb-h1", 0), ("none", "1f1b", 1), ("vocab-1", "1f1b", 0)],
)
def test_slices_of_a_stage_are_the_sums_of_their_layers(
    treatment: str, schedule: str, group: int
) -> None:
    run, plan = sliced(treatment, schedule, recomputation=Recomputation(group=group))
    subject = Subject.of(run, SLICES)
    for rank, found in enumerate(count_ranks(run, plan, LAYERS)):
        part = Part(subject.placement(plan, LAYERS, rank), subject.recomputation)
        expected = CountedRank(subject, plan, rank, part).count(lower(plan))
        assert found.rooms == expected.rooms
        for own, whole in zip(found.slices, expected.slices, strict=True):
            assert facts(own.passes) == facts(whole.passes)
            assert facts(own.begun) == facts(whole.begun)
            assert facts(own.ended) == facts(whole.ended)
            for key, count in own.passes.items():
                assert count.peak == whole.passes[key].peak, key


def test_the_first_stage_keeps_gradients_of_embeddings_until_they_are_read() -> None:
    """Although the rank that broadcasts them may wait for the broadcast later."""
    run, plan = sliced()
    for own in count_ranks(run, plan, LAYERS)[0].slices:
        assert own.ended["CIB", 0].left == 0
        assert own.passes["IB", 0].left < 0


def test_slices_multiply_what_the_whole_multiplies() -> None:
    """Causal attention of all slices forms each product of a query and a key once."""
    (run, plan), (alone, one) = sliced(), sliced(slices=1)
    for cut, whole in zip(
        count_ranks(run, plan, LAYERS), count_ranks(alone, one, LAYERS), strict=True
    ):
        for key, expected in whole.passes.items():
            assert executed([cut.passes[key]]) == executed([expected]), key


def test_work_grows_with_the_keys_before_a_slice_and_with_nothing_else() -> None:
    """Every further slice of the same length reads equally many keys more."""
    run, plan = sliced()
    first, *others = count_ranks(run, plan, LAYERS)[0].slices
    for kind in BOTH:
        flops = [executed([own.passes[kind, 0]]) for own in (first, *others)]
        steps = {later - earlier for earlier, later in pairwise(flops)}
        assert len(steps) == 1
        assert min(steps) > 0
    costs = costs_of(count_ranks(run, plan, LAYERS), plan, BY_FLOPS)
    times = [own.time("F", 0) for own in costs.slices]
    assert times == sorted(times)
    assert sum(times) == pytest.approx(costs.time("F", 0))


def test_the_first_slice_takes_the_buffer_of_keys_and_the_last_one_to_come_frees_it() -> None:
    """The gradients of earlier keys take fp32 for all tokens before the last slice."""
    run, plan = sliced()
    count = count_ranks(run, plan, LAYERS)[0]
    width = 2 * MODEL.attention.num_query_groups * (MODEL.attention.kv_channels or 0)
    keys, layers = 2 * width * LENGTH, LAYERS[0]
    left = {kind: [own.passes[kind, 0].left for own in count.slices] for kind in BOTH}
    assert left["F"][0] - left["F"][1] == layers * keys
    gradients = layers * 4 * width * (LENGTH - LENGTH // SLICES)
    assert left["B"][-1] - left["B"][1] == gradients
    assert left["B"][1] - left["B"][0] == layers * keys + gradients
    assert left["B"][1] == left["B"][2]


@pytest.mark.parametrize("strategy", ["uniform", "balanced"])
@pytest.mark.parametrize("treatment", ["none", "vocab-2"])
def test_only_losses_are_left_when_all_slices_are_through(
    treatment: str, strategy: SliceStrategy
) -> None:
    """One rank of the last stage keeps the loss of every slice until the iteration ends."""
    run, plan = sliced(treatment)
    run = replace(run, parallel=replace(run.parallel, slices=SliceSettings(SLICES, strategy)))
    for rank, count in enumerate(count_ranks(run, plan, LAYERS)):
        works = [
            own
            for part in count.slices
            for kind in (part.passes, part.begun, part.ended)
            for own in kind.values()
        ]
        assert sum(own.left for own in works) == GRANULE * SLICES * (rank == plan.ranks - 1)
