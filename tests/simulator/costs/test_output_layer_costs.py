"""The output layer is the same work wherever it runs, and redistribution balances it."""

import re

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.schedules.costs import Costs
from megatron.schedules.make_plan import make_plan
from megatron.schedules.passes import Pass
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.output_layer_costs import (
    place_output_layer,
    redistribute_layers,
    spread_output_layer,
)

SCHEDULES = st.sampled_from(["1f1b", "zb-h1", "zb-v"])
SHARDED = st.sampled_from(["vocab-2", "vocab-1", "naive"])
TIMES = st.floats(0.125, 8)


def work(costs: Costs, schedule: str, vocabulary: str, ranks: int) -> list[float]:
    """Return the time that every rank spends on one microbatch."""
    plan = make_plan(schedule, vocabulary, ranks, 1)
    return [
        sum(costs.of_pass(plan, rank, item) for item in plan.rows[rank]) for rank in range(ranks)
    ]


@settings(max_examples=examples(30))
@given(
    schedule=SCHEDULES,
    ranks=st.integers(1, 5),
    time=TIMES,
    vocabulary=SHARDED,
    recompute=st.booleans(),
)
def test_the_work_is_the_same_spread_or_on_the_last_stage(
    schedule: str, ranks: int, time: float, vocabulary: str, recompute: bool
) -> None:
    """Three products, and one more where the logits are not kept."""
    bare = Costs({"F": 1, "B": 1.5, "W": 0.5, "E": 0, "IF": 0, "IB": 0})
    stages = make_plan(schedule, "none", ranks, 1).stages
    layers = work(bare, schedule, "none", ranks)
    whole = place_output_layer(bare, stages, time, recompute=recompute)
    placed = work(whole, schedule, "none", ranks)
    treatment, output = TREATMENTS[vocabulary], (3 + recompute) * time
    passes = spread_output_layer(bare, ranks, treatment, time, recompute=recompute)
    spread = work(passes, schedule, vocabulary, ranks)
    assert sum(placed) == pytest.approx(sum(layers) + output)
    assert placed[stages[-1][0]] == pytest.approx(layers[stages[-1][0]] + output)
    assert spread == pytest.approx([rank + output / ranks for rank in layers])


def test_logits_are_formed_again_in_the_pass_of_the_weight_gradient() -> None:
    bare = Costs({"F": 1, "B": 1.5, "W": 0.5})
    stages = [(0, 0), (1, 0)]
    spread = spread_output_layer(bare, 2, TREATMENTS["vocab-2"], 2.0, recompute=True).passes
    assert (spread["S"], spread["T"]) == (2.0, 2.0)
    placed = place_output_layer(bare, stages, 2.0, recompute=True).passes
    assert placed == {"F": [[1], [3]], "B": [[1.5], [3.5]], "W": [[0.5], [4.5]]}
    redis = redistribute_layers(bare, stages, 8, 2.0, 4, recompute=True).passes
    assert redis == placed


def test_with_one_barrier_the_input_gradient_is_formed_before_it() -> None:
    costs = Costs({"F": 1, "B": 2})
    spread = spread_output_layer(costs, 4, TREATMENTS["vocab-2"], 2.0).passes
    assert {**spread, "F": 0, "B": 0} == {
        "F": 0, "B": 0, "S": 1.0, "T": 0.5
    }  # fmt: skip
    for vocabulary in ("vocab-1", "naive"):
        found = spread_output_layer(costs, 4, TREATMENTS[vocabulary], 2.0).passes
        assert (found["S"], found["T"]) == (0.5, 1.0)


def test_a_backward_that_is_not_split_takes_both_gradients() -> None:
    placed = place_output_layer(Costs({"F": 1, "B": 2}), [(0, 0), (1, 0)], 1.5)
    assert placed.passes == {"F": [[1], [2.5]], "B": [[2], [5]]}


@settings(max_examples=examples(30))
@given(ranks=st.integers(2, 5), v_shape=st.booleans(), time=TIMES, per_stage=st.integers(1, 6))
def test_redistribution_keeps_the_work_and_never_slows_the_slowest_stage(
    ranks: int, v_shape: bool, time: float, per_stage: int
) -> None:
    stages = make_plan("zb-v" if v_shape else "1f1b", "none", ranks, 1).stages
    bare = Costs({"F": 1, "B": 1.5, "W": 0.5})

    def by_stage(costs: Costs) -> list[float]:
        plan = make_plan("zb-v" if v_shape else "zb-h1", "none", ranks, 1)
        return [
            sum(costs.of_pass(plan, rank, Pass(kind, 0, chunk)) for kind in ("F", "B", "W"))
            for rank, chunk in stages
        ]

    even = by_stage(place_output_layer(bare, stages, time))
    balanced = by_stage(redistribute_layers(bare, stages, per_stage * len(stages), time))
    assert sum(balanced) == pytest.approx(sum(even))
    assert max(balanced) <= max(even) + 1e-9
    assert all(one <= balanced[-1] + 3 / per_stage + 1e-9 for one in balanced)


def test_the_last_stage_may_be_given() -> None:
    costs = redistribute_layers(Costs({"F": 4, "B": 8}), [(0, 0), (1, 0), (2, 0)], 12, 0.5, last=2)
    assert costs.passes == {"F": [[5], [5], [2.5]], "B": [[10], [10], [5]]}


def test_times_of_a_distribution_are_not_distributed_again() -> None:
    costs = Costs({"F": 1, "B": [1, 1, 3]})
    with pytest.raises(ValueError, match=re.escape("B has times by rank")):
        redistribute_layers(costs, [(0, 0), (1, 0), (2, 0)], 12, 0.0)
