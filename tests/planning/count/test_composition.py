"""Parts that are counted apart and put together are the whole that they came from."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from planning.count.counting import FURTHER, LLAMA, MODEL, counted, plan_of, run_of

from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.layers.patterns import LayerPattern
from megatron.layers.recompute import Recomputation
from megatron.model.settings import ModelSettings
from megatron.parallel.settings import TensorRankSettings
from megatron.planning.count import run as counting_run
from megatron.planning.count.rank import CountedRank, Part
from megatron.planning.count.run import count_ranks
from megatron.planning.count.subject import Subject
from megatron.run.run_config import RunConfig
from megatron.schedules.lower import lower
from megatron.schedules.plan import Plan
from megatron.simulator.costs.count import AWAIT, Await, PassCount, RankCount, Step
from megatron.simulator.costs.in_a_row import in_a_row

UNLIKE = LLAMA.replaced(
    num_layers=6, window_size=5, window_attn_skip_freq=LayerPattern(listed=(1, 0, 1))
)
"""Of three layers in a row, no two neighbours are alike."""

WAYS = {
    "everything kept": Recomputation(),
    "all layers again": Recomputation(group=1),
    "groups of two again": Recomputation(group=2),
    "the first two again": Recomputation(group=1, most=2),
    "a group of two again": Recomputation(group=2, most=1),
    "parts again": Recomputation(frozenset({"core_attn", "layernorm", "mlp"})),
}


def counted_whole(run: RunConfig, plan: Plan, layers: Sequence[int], rank: int) -> RankCount:
    """Return the count of a rank with all layers in one part."""
    subject = Subject.of(run)
    part = Part(subject.placement(plan, layers, rank), subject.recomputation)
    return CountedRank(subject, plan, rank, part).count(lower(plan))


def steps_of(count: PassCount) -> Counter[Step]:
    """Return all kernels and communications of a pass, however it is divided."""
    steps: Counter[Step] = Counter()
    for work, times in count.parts:
        for step in work.steps:
            # How far a W gathers ahead is not known where parts meet: see ``in_a_row``.
            steps[AWAIT if isinstance(step, Await) else step] += times
    return steps


def facts(counts: Mapping[Any, PassCount]) -> dict[Any, tuple[float, Counter[Step]]]:
    """Return the memory that passes or communications leave, and their steps."""
    return {key: (own.left, steps_of(own)) for key, own in counts.items()}


def assert_same(found: RankCount, expected: RankCount) -> None:
    """Compare all that two counts say."""
    assert found.parameters == expected.parameters
    ours, theirs = (sorted(size for _, size in own.parameters.sizes) for own in (found, expected))
    assert ours == theirs
    assert found.held == expected.held
    assert found.rooms == expected.rooms
    assert facts(found.passes) == facts(expected.passes)
    assert facts(found.begun) == facts(expected.begun)
    assert facts(found.ended) == facts(expected.ended)
    for key, own in found.passes.items():
        assert own.peak == expected.passes[key].peak, key


@pytest.mark.parametrize("layers", [2, 5])
def test_a_w_gathers_for_the_next_layer_during_the_last_products_of_a_layer(layers: int) -> None:
    """The counts of layers in a row have the steps of the whole pass, in its order."""
    model, ranks = MODEL.replaced(num_layers=3 * layers), TensorRankSettings(2, True)
    run = run_of(model, "none", 3, sizes={"tensor": ranks})
    plan, each = plan_of(run, "zb-h1"), [layers] * 3
    found = count_ranks(run, plan, each)[1].passes["W", 0].parts
    whole = counted_whole(run, plan, each, 1).passes["W", 0].parts
    assert sum(times for _, times in found) > len(whole)
    in_row = in_a_row([work for work, times in found for _ in range(times)])
    assert in_row.steps == tuple(step for work, _ in whole for step in work.steps)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("narrow", [False, True], ids=["16 bits", "8 bits with wide ends"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("way", WAYS)
def test_a_stage_of_unlike_layers_is_the_sum_of_its_layers(
    way: str, schedule: str, narrow: bool
) -> None:
    eight_bits = (
        EightBitSettings(
            "hybrid",
            fp8_amax_history_len=4,
            first_last_layers_bf16=True,
            num_layers_at_start_in_bf16=1,
            num_layers_at_end_in_bf16=2,
        )
        if narrow
        else None
    )
    run = run_of(UNLIKE, "vocab-2", 2, recomputation=WAYS[way], eight_bits=eight_bits)
    plan = plan_of(run, schedule)
    layers = [3, 3] if plan.chunks == 1 else [2, 1, 0, 3]
    for rank, found in enumerate(count_ranks(run, plan, layers)):
        assert_same(found, counted_whole(run, plan, layers, rank))


@pytest.mark.parametrize("split", [False, True], ids=["whole sequences", "split sequences"])
def test_collectives_of_tensor_ranks_are_those_of_all_layers(split: bool) -> None:
    run = run_of(UNLIKE, "vocab-1", 2, sizes={"tensor": TensorRankSettings(2, split)})
    plan = plan_of(run, "zb-h1")
    for rank, found in enumerate(count_ranks(run, plan, [3, 3])):
        assert_same(found, counted_whole(run, plan, [3, 3], rank))


@pytest.mark.parametrize("ahead", [1, 2])
def test_layers_that_are_computed_again_ahead_are_in_their_own_pass(ahead: int) -> None:
    run = run_of(UNLIKE, "vocab-2", 2, recomputation=Recomputation(group=2))
    plan = plan_of(run, recompute_ahead=ahead)
    for rank, found in enumerate(count_ranks(run, plan, [3, 3])):
        assert_same(found, counted_whole(run, plan, [3, 3], rank))
        assert found.passes["R", 0].flops > 0


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
@pytest.mark.parametrize("treatment", ["none", "vocab-2"])
@pytest.mark.parametrize("model", [MODEL, FURTHER], ids=["gpt", "further tokens"])
def test_ranks_that_share_a_count_are_counted_like_themselves(
    model: ModelSettings, treatment: str, schedule: str
) -> None:
    """Ranks 1 and 2 have the same parts, under other numbers of stages."""
    run = run_of(model, treatment, 4)
    plan = plan_of(run, schedule)
    layers = [8 // len(plan.stages)] * len(plan.stages)
    for rank, found in enumerate(count_ranks(run, plan, layers)):
        assert_same(found, counted_whole(run, plan, layers, rank))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("treatment", ["none", "vocab-1"])
@pytest.mark.parametrize("split", [False, True], ids=["whole sequences", "split sequences"])
def test_the_ends_of_the_pipeline_come_before_and_after_all_layers(
    split: bool, treatment: str, schedule: str
) -> None:
    """In B the gathered gradient of the embeddings is there when all layers are through."""
    run = run_of(MODEL, treatment, 2, sizes={"tensor": TensorRankSettings(2, split)})
    plan = plan_of(run, schedule)
    for rank, found in enumerate(count_ranks(run, plan, [4, 4])):
        assert_same(found, counted_whole(run, plan, [4, 4], rank))


def test_a_stage_of_which_some_layers_are_computed_again_is_the_sum_of_its_layers() -> None:
    """The layers that are not come behind those that are."""
    run = run_of(MODEL, "vocab-2", 2, recomputation=Recomputation(group=2, most=1))
    plan = plan_of(run, "zb-h1")
    for rank, found in enumerate(count_ranks(run, plan, [5, 3])):
        assert_same(found, counted_whole(run, plan, [5, 3], rank))


class CountsRanks(CountedRank):
    """A rank that notes that it was made."""

    made = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        type(self).made += 1
        super().__init__(*args, **options)


def test_a_hundred_equal_layers_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first, the last and an inner rank with a layer each, and a layer between others."""
    monkeypatch.setattr(counting_run, "CountedRank", CountsRanks)
    made = []
    for layers in (8, 100):
        counting_run._counted_segment.cache_clear()
        counting_run._whole_rank.cache_clear()
        monkeypatch.setattr(CountsRanks, "made", 0)
        counted(run_of(replace(MODEL, num_layers=layers), "vocab-2", 4), [layers // 4] * 4)
        made.append(CountsRanks.made)
    assert made == [4, 4]
