"""Times from a model: the same work wherever it runs, each part where it belongs."""

from dataclasses import replace

import numpy as np
import pytest

from megatron.schedules.make_plan import make_plan
from megatron.schedules.passes import Pass
from megatron.schedules.treatments import TREATMENTS, Treatment
from megatron.simulator.costs.device import UNFUSED, Device, Traffic
from megatron.simulator.costs.from_model import ModelTimes
from megatron.simulator.costs.recomputed import NOTHING, Recomputed
from megatron.simulator.costs.shape import Shape, TensorSplit
from megatron.simulator.costs.stage_costs import even_layers, stage_costs

SHAPE = Shape(1024, 16, 512, 50_000)
DEVICE = Device(
    peak_flops=100e12,
    attained={"forward": 0.6, "backward": 0.5, "output": 0.8},
    memory_bandwidth=1e12,
    link_bandwidth=1e11,
    link_latency=1e-4,
)
NO_TRAFFIC = Traffic(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
V_SHAPE = ((0, 0), (1, 0), (1, 1), (0, 1))


def test_a_pass_takes_its_products_its_traffic_and_its_overhead() -> None:
    slow = ModelTimes(SHAPE, replace(DEVICE, overhead={"S": 1e-3}))
    times = slow.vocabulary_passes(2, TREATMENTS["vocab-1"])
    product = 2 * 512 * 1024 * 50_000 / (100e12 * 0.8)
    moved = 38 * 512 * 50_000 / 1e12
    assert times["S"] == pytest.approx((product + moved) / 2 + 1e-3)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("treatment", [t for t in TREATMENTS.values() if t.is_sharded])
def test_shards_together_do_the_products_of_the_whole_output_layer(
    treatment: Treatment, early: bool
) -> None:
    times = ModelTimes(SHAPE, DEVICE, NO_TRAFFIC, early)
    passes = times.vocabulary_passes(4, treatment)
    assert 4 * (passes["S"] + passes["T"]) == pytest.approx(sum(times.whole_output().values()))


def test_vocabulary_layers_are_on_the_first_and_the_last_stage() -> None:
    times = ModelTimes(SHAPE, DEVICE)
    costs = stage_costs(times, V_SHAPE, TREATMENTS["none"]).costs([1, 2, 3, 4]).passes
    layer, output, embedding = times.layer(), times.whole_output(), times.whole_input()
    for kind in ("F", "B", "W"):
        assert costs[kind] == [
            [layer[kind] + embedding[kind], 4 * layer[kind] + output[kind]],
            [2 * layer[kind], 3 * layer[kind]],
        ]
    assert "S" not in costs


@pytest.mark.parametrize(
    ("treatment", "collectives"),
    [
        ("redis", set()),
        ("vocab-2", {"C0", "C1", "CIF", "CIB"}),
        ("vocab-1", {"C0", "C1", "C2", "CIF", "CIB"}),
        ("interlaced", {"C0", "C1", "C2", "CIF", "CIB"}),
        ("naive", {"C0", "C1", "C2", "C3", "CIF", "CIB"}),
    ],
)
def test_communications_of_a_treatment(treatment: str, collectives: set[str]) -> None:
    comms = stage_costs(ModelTimes(SHAPE, DEVICE), V_SHAPE, TREATMENTS[treatment]).comms
    assert set(comms) == {"X", "G"} | collectives
    assert comms["X"] == pytest.approx(1e-4 + 2 * 512 * 1024 / 1e11)


def test_recomputation_runs_the_forward_again() -> None:
    line = [(rank, 0) for rank in range(4)]
    usual, again = (
        stage_costs(
            ModelTimes(replace(SHAPE, recomputed=which), DEVICE, NO_TRAFFIC),
            line,
            TREATMENTS["vocab-2"],
        ).costs([1, 2, 3, 4])
        for which in (NOTHING, Recomputed(group=1, most=3))
    )
    assert all(again.passes[kind] == usual.passes[kind] for kind in usual.passes)
    forward_at_backward_rate = SHAPE.forward_flops / (100e12 * 0.5)
    found = np.array(again.passes["R"])
    layers = [1, 2, 3, 3]
    assert found[:, 0] == pytest.approx(np.array(layers) * forward_at_backward_rate)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_what_is_computed_again_takes_as_long_in_a_pass_of_its_own(schedule: str) -> None:
    line = [(rank, 0) for rank in range(2)]
    shape = replace(SHAPE, recomputed=Recomputed(group=1))
    costs = stage_costs(ModelTimes(shape, DEVICE), line, TREATMENTS["none"]).costs([2, 3])
    within, apart = (make_plan(schedule, "none", 2, 1, recompute_ahead=n) for n in (None, 1))
    for rank in range(2):
        joined = costs.of_pass(within, rank, Pass("B", 0))
        parts = [costs.of_pass(apart, rank, Pass(kind, 0)) for kind in ("R", "B")]
        assert joined == pytest.approx(sum(parts))
        assert min(parts) > 0


def test_parts_of_layers_run_again() -> None:
    usual = ModelTimes(SHAPE, DEVICE).layer()
    whole = Recomputed(core=True, norms=True, mlp=True)
    again = ModelTimes(replace(SHAPE, recomputed=whole), DEVICE).layer()
    flops = SHAPE.attention_flops + SHAPE.linear_flops / 3  # 4 h^2 of 12 h^2 parameters
    moved = (8 + 8 + 16) * SHAPE.elements
    assert again["B"] - usual["B"] == pytest.approx(flops / (100e12 * 0.5) + moved / 1e12)
    assert (again["F"], again["W"]) == (usual["F"], usual["W"])


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("treatment", [t for t in TREATMENTS.values() if t.is_sharded])
def test_logits_that_are_not_kept_take_one_more_product(treatment: Treatment, early: bool) -> None:
    """In T, or in the backward of a whole output layer; exponentials too, as in the forward."""
    usual = ModelTimes(SHAPE, DEVICE, early_whole=early)
    again = replace(usual, shape=replace(SHAPE, vocab_recompute=True))
    forward = usual.whole_output()["F"]
    if early:
        forward -= 2 * SHAPE.output_product_flops / (2 * 100e12 * 0.8) + 6 * SHAPE.logits / 1e12
    whole = {kind: again.whole_output()[kind] - time for kind, time in usual.whole_output().items()}
    backward = "W" if early else "B"
    assert whole == pytest.approx({"F": 0, "B": 0, "W": 0} | {backward: forward})
    shard = {
        kind: again.vocabulary_passes(4, treatment)[kind] - time
        for kind, time in usual.vocabulary_passes(4, treatment).items()
    }
    rescaled = 8 * SHAPE.logits / 1e12  # exponentials relative to the maximum of all shards
    assert shard.pop("T") == pytest.approx((forward - rescaled) / 4)
    if treatment.maximum_first:
        assert shard.pop("E") == pytest.approx(-8 * SHAPE.logits / 1e12 / 4)  # left to S and T
    assert not any(shard.values())


def test_redis_makes_the_slowest_stage_faster() -> None:
    times = ModelTimes(SHAPE, DEVICE)
    layer = sum(times.layer().values())
    output = sum(times.whole_output().values())
    assert output > layer
    line = [(rank, 0) for rank in range(4)]
    redis = stage_costs(times, line, TREATMENTS["redis"])
    counts = redis.balanced(32)
    assert sum(counts) == 32
    assert counts[-1] < 8
    slowest = max(layer * max(counts[:-1]), layer * counts[-1] + output)
    assert slowest < 8 * layer + output
    assert redis.balanced(32, last=2)[-1] == 2
    assert even_layers(34, 4) == (8, 8, 9, 9)


def test_what_makes_no_costs_is_refused() -> None:
    times = ModelTimes(SHAPE, DEVICE)
    with pytest.raises(ValueError, match="given for 3 of 4 stages"):
        stage_costs(times, V_SHAPE, TREATMENTS["none"]).costs([1] * 3)
    with pytest.raises(ValueError, match="memory_bandwidth=0 is no rate"):
        replace(DEVICE, memory_bandwidth=0.0)
    with pytest.raises(ValueError, match="link_bandwidth=nan is no rate"):
        replace(DEVICE, link_bandwidth=float("nan"))
    with pytest.raises(ValueError, match="attained output=-1 is no rate"):
        replace(DEVICE, attained={"output": -1.0})
    with pytest.raises(ValueError, match="overhead S=-1 is no time"):
        replace(DEVICE, overhead={"S": -1.0})
    with pytest.raises(ValueError, match="backward products attain is not given"):
        replace(DEVICE, attained={"forward": 1.0}).product("backward", 1.0)


def test_the_loss_moves_less_back_than_forth() -> None:
    """What calibration needs: two slopes that tell products and traffic apart."""
    assert 2 * UNFUSED.loss_forward > UNFUSED.loss_backward


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_ranks_share_the_work_within_attention_and_mlp_and_move_its_ends(
    sequence_parallel: bool,
) -> None:
    """By hand: 8 bytes an element are moved within and 4 outside; a round is three hops."""
    traffic = replace(NO_TRAFFIC, layer_forward=12, outside_forward=4)
    alone = ModelTimes(SHAPE, DEVICE, traffic).layer()
    a_round = 3 * (2 * 512 * 1024 / 4 / 1e11 + 1e-4)
    shape = replace(SHAPE, tensor=TensorSplit(4, sequence_parallel))
    split = ModelTimes(shape, DEVICE, traffic).layer()
    moved = (8 / 4 + (1 if sequence_parallel else 4)) * 512 * 1024 / 1e12
    product = SHAPE.forward_flops / 4 / (100e12 * 0.6)
    assert split["F"] == pytest.approx(product + moved + 4 * a_round)
    assert split["B"] == pytest.approx(alone["B"] / 4 + 4 * a_round)
    again = 4 * a_round if sequence_parallel else 0
    assert split["W"] == pytest.approx(alone["W"] / 4 + again)
    joined = ModelTimes(shape, DEVICE, traffic, split_backward=False).layer()
    before = 2 * a_round if sequence_parallel else 0
    assert joined["B"] == pytest.approx(alone["B"] / 4 + before)
    beside = 2 * a_round if sequence_parallel else 4 * a_round
    assert joined["W"] == pytest.approx(max(alone["W"] / 4, beside))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_collectives_of_the_vocabulary_have_two_levels(sequence_parallel: bool) -> None:
    """A part of an activation along the pipeline, then a ring of the tensor ranks."""
    shape = replace(SHAPE, tensor=TensorSplit(4, sequence_parallel))
    comms = ModelTimes(shape, DEVICE).communications(TREATMENTS["vocab-1"])
    part = 2 * 512 * 1024 / 4 / 1e11 + 1e-4  # between any two ranks
    assert comms["C0"] == comms["CIB"] == pytest.approx(part + 3 * part)
    rounds = 1 if sequence_parallel else 2
    assert comms["CIF"] == comms["C2"] == pytest.approx(part + rounds * 3 * part)
    whole = 2 * 512 * 1024 / 1e11 + 1e-4
    assert comms["X"] == comms["G"] == pytest.approx(part if sequence_parallel else whole)


def test_the_tensor_ranks_of_an_end_share_its_vocabulary() -> None:
    shape = replace(SHAPE, tensor=TensorSplit(4))
    free = replace(DEVICE, link_bandwidth=float("inf"), link_latency=0.0)
    alone, shared = (ModelTimes(each, free) for each in (SHAPE, shape))
    for kind, time in shared.whole_output().items():
        assert time == pytest.approx(alone.whole_output()[kind] / 4)
    costs = stage_costs(shared, V_SHAPE, TREATMENTS["vocab-2"]).others
    assert costs["S"] == alone.vocabulary_passes(8, TREATMENTS["vocab-2"])["S"]
