"""The assumed costs add up to the FLOPs of an iteration; measured ones come back as they were."""

from dataclasses import replace
from itertools import product
from typing import Any, TypeVar

import numpy as np
import pytest

from megatron.layers.recompute import Recomputation
from megatron.model.config import ModelConfig
from megatron.schedules.costs import Costs
from megatron.schedules.make_plan import make_plan
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.cost_file import CostFile
from megatron.simulator.costs.device import FLOPS_PER_BYTE, FUSED
from megatron.simulator.costs.measured_costs import measured_costs
from megatron.simulator.costs.shape import iteration_flops
from megatron.simulator.costs.stage_costs import StageCosts, Stages, notional_costs
from megatron.training.planning.model_shape import shape_of

MODEL = ModelConfig(
    num_layers=8,
    hidden_size=64,
    ffn_hidden_size=256,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=16,
    seq_length=32,
    max_position_embeddings=32,
    vocab_size=1000,
)
LLAMA = replace(MODEL, num_query_groups=2, swiglu=True, kv_channels=24, ffn_hidden_size=100)
LOCAL = replace(LLAMA, window_size=5, window_pattern=(1, 1, 0))
SAMPLES = 3


def by_flops(model: ModelConfig, stages: Stages, treatment: str, samples: int = 1) -> StageCosts:
    """Costs on the notional device."""
    return notional_costs(shape_of(model, samples), stages, TREATMENTS[treatment])


def of_pass(
    costs: Costs, schedule: str, treatment: str, ranks: int, at: tuple[int, int], kind: PassKind
) -> float:
    plan = make_plan(schedule, treatment, ranks, 1)
    rank, chunk = at
    return costs.of_pass(plan, rank, Pass(kind, 0, chunk))


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("treatment", "ranks", "schedule", "model"),
    list(product(TREATMENTS, (1, 2, 4), ("1f1b", "zb-v"), (MODEL, LLAMA, LOCAL))),
)
def test_a_microbatch_costs_its_share_of_the_iteration(
    treatment: str, ranks: int, schedule: str, model: ModelConfig
) -> None:
    """Beside the lookups of the input layer and the exponentials, which are no products."""
    plan = make_plan(schedule, treatment, ranks, 1)
    layers = [0] * len(plan.stages)
    layers[0], layers[-1] = 3, 5 if len(layers) > 1 else 8
    costs = by_flops(model, plan.stages, treatment, SAMPLES).costs(layers)
    total = sum(
        costs.of_pass(plan, rank, item)
        for rank, row in enumerate(plan.rows)
        for item in row
        if item.kind not in ("IF", "IB", "E")
    )
    lookup = FLOPS_PER_BYTE * FUSED.lookup * SAMPLES * 32 * 64
    lookups = 0 if TREATMENTS[treatment].is_sharded else 2 * lookup
    assert total == pytest.approx(
        iteration_flops(shape_of(model, SAMPLES), model.num_layers, 1) + lookups
    )


def test_attention_itself_has_no_weight_gradient() -> None:
    longer = replace(MODEL, seq_length=64)
    [costs, twice] = [by_flops(model, [(0, 0)], "vocab-2").layer for model in (MODEL, longer)]
    assert twice["W"] == 2 * costs["W"]
    assert twice["F"] - 2 * costs["F"] == (twice["B"] - 2 * costs["B"]) / 2 > 0


def test_the_whole_output_layer_is_in_the_last_stage_wherever_that_is() -> None:
    stages = make_plan("v-half", "none", 2, 1).stages
    assert stages[-1] == (0, 1)
    costs = by_flops(MODEL, stages, "none").costs([2] * 4)
    shape = shape_of(MODEL, 1)
    expected: dict[PassKind, int] = {"F": 2, "B": 0, "W": 1}
    for kind, products in expected.items():
        last, inner = (
            of_pass(costs, "v-half", "none", 2, at, kind) for at in (stages[-1], stages[1])
        )
        assert last - inner == pytest.approx(products * shape.output_product_flops)


@pytest.mark.parametrize(
    ("treatment", "in_s", "in_t"),
    [("vocab-2", 2, 1), ("vocab-1", 1, 2), ("naive", 1, 2), ("interlaced", 1, 2)],
)
def test_products_of_s_and_t(treatment: str, in_s: int, in_t: int) -> None:
    stages = [(rank, 0) for rank in range(4)]
    shape = shape_of(MODEL, 1)
    others = by_flops(MODEL, stages, treatment).others
    assert others["S"] == in_s * shape.output_product_flops / 4
    assert others["T"] == in_t * shape.output_product_flops / 4


T = TypeVar("T")

STAGES: dict[str, Stages] = {
    "one": [(0, 0), (1, 0), (2, 0)],
    "folded": [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)],
    "two": [(0, 0), (1, 0)],
}


def table(stages: Stages, values: list[T]) -> list[list[T]]:
    ranks, chunks = (1 + max(numbers) for numbers in zip(*stages, strict=True))
    at = dict(zip(stages, values, strict=True))
    return [[at[rank, chunk] for chunk in range(chunks)] for rank in range(ranks)]


@pytest.mark.parametrize("stages", list(STAGES.values()), ids=list(STAGES))
@pytest.mark.parametrize("treatment", ["none", "vocab-2"])
def test_what_was_measured_holds_for_the_layers_it_was_measured_with(
    stages: Stages, treatment: str
) -> None:
    """Also where ranks differ."""
    assumed = by_flops(MODEL, stages, treatment)
    layers = [2, 1, *[2] * (len(stages) - 2)]
    bases: dict[PassKind, float] = {"F": 1.0, "B": 1.5, "W": 0.5}
    times = {
        kind: table(stages, [base + 0.37 * i**1.5 for i in range(len(stages))])
        for kind, base in bases.items()
    }
    others = dict.fromkeys(assumed.others, 0.25)
    costs = Costs({**times, **others}, {"X": 0.1})
    file = CostFile(costs, None, table(stages, layers), frozenset(costs.passes))
    again = measured_costs(file, assumed).costs(layers)
    assert again.comms == {"X": 0.1}
    found: Any = again.passes
    for kind, values in times.items():
        assert [list(row) for row in found[kind]] == [pytest.approx(row) for row in values]
    if treatment == "vocab-2":
        assert again.passes["S"] == 0.25


@pytest.mark.parametrize("stages", list(STAGES.values()), ids=list(STAGES))
def test_a_machine_that_does_what_flops_say_is_measured_as_such(stages: Stages) -> None:
    """The layer's time is found whether or not there are stages without vocabulary."""
    assumed = by_flops(MODEL, stages, "none")
    layers = [2] * len(stages)
    file = CostFile(assumed.costs(layers), None, table(stages, layers))
    other = [3, 1, *[2] * (len(stages) - 2)]
    found: Any = measured_costs(file, assumed).costs(other)
    known: Any = assumed.costs(other).passes
    for kind, row in known.items():
        assert found.passes[kind] == [pytest.approx(own) for own in row]


def test_layers_with_a_window_cost_less_where_they_are() -> None:
    model = replace(MODEL, window_size=5, window_pattern=(1, 1, 1, 1, 0, 0, 0, 0))
    known: Any = by_flops(model, [(0, 0), (1, 0)], "vocab-2").costs([4, 4]).passes
    full: Any = by_flops(MODEL, [(0, 0), (1, 0)], "vocab-2").costs([4, 4]).passes
    assert known["W"] == full["W"]
    assert known["F"][1] == full["F"][1]
    shape = shape_of(MODEL, 1)
    # of 32 x 32 pairs those with at most 5 positions between the two
    pairs = 32 * 11 - 5 * 6
    spared = 4 * shape.attention_flops * (1 - pairs / 32**2)
    assert full["F"][0][0] - known["F"][0][0] == pytest.approx(spared)
    assert full["B"][0][0] - known["B"][0][0] == pytest.approx(2 * spared)


@pytest.mark.parametrize(
    "again",
    [
        Recomputation(frozenset({"core_attn"})),
        Recomputation(group=1),
        Recomputation(group=1, most=2),
        Recomputation(group=3),
    ],
)
def test_what_windows_hide_is_not_computed_again(again: Recomputation) -> None:
    """What R takes, or is added to B, is what the FLOPs say, and a window makes it less."""
    model = replace(MODEL, window_size=5, window_pattern=(1, 1, 1, 1, 1, 0, 0, 0))
    stages, layers, treatment = [(0, 0), (1, 0)], [5, 3], TREATMENTS["vocab-2"]
    for known in (model, MODEL):
        shape = shape_of(known, 1, again)
        plain: Any = by_flops(known, stages, "vocab-2").costs(layers).passes
        found: Any = notional_costs(shape, stages, treatment).costs(layers).passes
        own = found["R"] if "R" in found else np.subtract(found["B"], plain["B"])
        assert again.parts or np.array_equal(found["B"], plain["B"])
        added = [time for (time,) in own]
        flops = [shape.stage_repeated_flops(5), shape.stage_repeated_flops(3, 5)]
        assert added == [pytest.approx(own) for own in flops]
    whole = shape_of(MODEL, 1, again).stage_repeated_flops(5)
    shape = shape_of(model, 1, again)
    number = 5 if again.parts else again.most or 5
    assert whole - shape.stage_repeated_flops(5) == number * shape.hidden_flops(5) > 0


def test_measured_layers_with_a_window_are_told_from_those_without() -> None:
    """A machine that does what FLOPs say is measured as such, for other layers on the stages."""
    model = replace(MODEL, num_layers=6, window_size=3, window_pattern=(1, 0, 0))
    stages = STAGES["one"]
    assumed = by_flops(model, stages, "none")
    file = CostFile(assumed.costs([2, 2, 2]), None, table(stages, [2, 2, 2]))
    found: Any = measured_costs(file, assumed).costs([3, 2, 1])
    known: Any = assumed.costs([3, 2, 1]).passes
    for kind, row in known.items():
        assert found.passes[kind] == [pytest.approx(own) for own in row]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (None, "layers is no table for 3 ranks with 1 chunk"),
        ([[1, 1], [1, 1]], "layers is no table"),
        ([[1], [1], [1]], "F is no table for 3 ranks"),
    ],
)
def test_costs_of_other_stages_are_refused(layers: list[list[int]] | None, message: str) -> None:
    assumed = by_flops(MODEL, STAGES["one"], "none")
    with pytest.raises(ValueError, match=message):
        measured_costs(CostFile(Costs({"F": 1.0, "B": [1.0, 2.0, 3.0]}), None, layers), assumed)


@pytest.mark.parametrize(("measured", "planned"), [("none", "vocab-2"), ("vocab-2", "redis")])
def test_costs_of_another_treatment_are_refused(measured: str, planned: str) -> None:
    """Else the output layer would be free, or layers balanced as if there were none."""
    stages = STAGES["one"]
    costs = by_flops(MODEL, stages, measured).costs([2, 2, 2])
    file = CostFile(costs, None, [[2], [2], [2]], frozenset(costs.passes))
    assumed = by_flops(MODEL, stages, planned)
    with pytest.raises(ValueError, match=f"not measured with the vocabulary treatment {planned}"):
        measured_costs(file, assumed)
