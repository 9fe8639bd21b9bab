"""Costs of stages for any distribution of layers, by counts or as they were measured."""

from dataclasses import replace
from typing import Any, TypeVar

import pytest
from planning.count.counting import LLAMA, MODEL, run_of

from megatron.layers.patterns import LayerPattern
from megatron.model.settings import ModelSettings
from megatron.planning.run_costs import layers_alone, planned_costs, stage_costs
from megatron.schedules.costs import Costs
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.cost_file import CostFile
from megatron.simulator.costs.measured_costs import measured_costs
from megatron.simulator.costs.stage_costs import StageCosts, Stages, even_layers


def plan_through(stages: Stages, treatment: str) -> Plan:
    """Return a plan of one microbatch with these stages."""
    ranks = 1 + max(rank for rank, _ in stages)
    rows: list[list[Pass]] = [[] for _ in range(ranks)]
    spread = TREATMENTS[treatment].is_sharded
    for row in rows if spread else []:
        row.append(Pass("IF", 0))
    for rank, chunk in stages:
        rows[rank].append(Pass("F", 0, chunk))
    for row in rows if spread else []:
        row.append(Pass("S", 0))
    for rank, chunk in reversed(stages):
        rows[rank] += [Pass("B", 0, chunk), Pass("W", 0, chunk)]
    for row in rows if spread else []:
        row += [Pass("T", 0), Pass("IB", 0)]
    return Plan(tuple(map(tuple, rows)), tuple(stages), 1, TREATMENTS[treatment])


def by_flops(model: ModelSettings, stages: Stages, treatment: str) -> StageCosts:
    """Return costs where no GPU is known."""
    ranks = 1 + max(rank for rank, _ in stages)
    run, plan = run_of(model, treatment, ranks), plan_through(stages, treatment)
    layers = even_layers(model.num_layers, len(stages))
    return stage_costs(run, plan, layers)


@pytest.mark.parametrize("treatment", ["none", "vocab-2"])
@pytest.mark.parametrize(
    "model",
    [LLAMA, LLAMA.replaced(window_size=5, window_attn_skip_freq=LayerPattern(listed=(1, 1, 0)))],
    ids=["same", "local"],
)
def test_costs_of_any_distribution_are_those_of_its_own_count(
    model: ModelSettings, treatment: str
) -> None:
    stages = STAGES["folded"]
    assumed, plan = by_flops(model, stages, treatment), plan_through(stages, treatment)
    layers = [2, 1, 1, 2, 1, 1]
    found: Any = assumed.costs(layers).passes
    known: Any = planned_costs(run_of(model, treatment, 3), plan, layers).passes
    for kind in ("F", "B", "W"):
        assert found[kind] == [pytest.approx(own, rel=1e-3) for own in known[kind]]
    with pytest.raises(ValueError, match="given for 3 of 6 stages"):
        assumed.costs([1] * 3)


def test_attention_itself_has_no_weight_gradient() -> None:
    longer = MODEL.replaced(seq_length=64, max_position_embeddings=64)
    [costs, twice] = [by_flops(model, [(0, 0)], "vocab-2").layer for model in (MODEL, longer)]
    assert twice["W"] == 2 * costs["W"]
    assert twice["F"] - 2 * costs["F"] == (twice["B"] - 2 * costs["B"]) / 2 > 0


def test_redis_takes_layers_from_the_last_stage() -> None:
    large = replace(MODEL, num_layers=32, vocab_size=9600)
    redis = by_flops(large, [(rank, 0) for rank in range(4)], "redis")
    layer, output = sum(redis.layer.values()), sum(redis.extras[-1].values())
    assert output > layer
    counts = redis.balanced(32)
    assert sum(counts) == 32
    slowest = max(layer * max(counts[:-1]), layer * counts[-1] + output)
    assert slowest < 8 * layer + output
    assert redis.balanced(32, last=2)[-1] == 2
    assert even_layers(34, 4) == (8, 8, 9, 9)


def test_redis_knows_which_layers_are_fast() -> None:
    """Two layers in three have a window, so the first stages get more of them."""
    local = MODEL.replaced(num_layers=12, seq_length=512, max_position_embeddings=512)
    local = local.replaced(
        window_size=16, window_attn_skip_freq=LayerPattern(listed=(1,) * 6 + (0,) * 6)
    )
    redis = by_flops(local, STAGES["two"], "redis")
    times = redis.of_layers(12)
    assert times[0] < times[-1]
    first, last = redis.balanced(12)
    output = sum(redis.extras[-1].values())

    def slowest(first: int) -> float:
        return max(sum(times[:first]), sum(times[first:]) + output)

    assert first > last
    assert slowest(first) == pytest.approx(min(map(slowest, range(13))), rel=1e-3)


def test_layers_of_equal_cost_on_every_stage_do_not_depend_on_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So no rank is counted as a whole for them."""
    monkeypatch.setattr("megatron.planning.run_costs.count_ranks", None)
    deep, stages = replace(LLAMA, num_layers=6), STAGES["two"]
    for treatment in ("none", "vocab-2"):
        spread = layers_alone(run_of(deep, treatment, 2), plan_through(stages, treatment))
        assert spread.alike(6) == (3, 3)
        assert spread.alike(7, further=1) == (4, 3), "a further token's layer is the last stage's"


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


def test_measured_layers_with_a_window_are_told_from_those_without() -> None:
    """A machine that does what FLOPs say is measured as such, for other layers on the stages."""
    model = MODEL.replaced(
        num_layers=6, window_size=3, window_attn_skip_freq=LayerPattern(listed=(1, 0, 0))
    )
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
