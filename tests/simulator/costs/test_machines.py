"""Transfers take the time of their link: within a machine, and over the network between two."""

from dataclasses import replace
from typing import Any

import pytest

from megatron.schedules.costs import Costs
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import Comm
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.cost_file import parse_costs
from megatron.simulator.costs.device import NOTIONAL, Device
from megatron.simulator.costs.from_model import ModelTimes
from megatron.simulator.costs.gpus import GPUS, gpu_of_driver, interconnect
from megatron.simulator.costs.machines import Machines
from megatron.simulator.costs.replicas import Link
from megatron.simulator.costs.shape import Shape, TensorSplit
from megatron.simulator.costs.stage_costs import notional_costs, stage_costs
from megatron.simulator.simulate import simulate

SHAPE = Shape(1024, 16, 512, 50_000)
DEVICE = Device(
    peak_flops=100e12,
    attained={"forward": 0.6, "backward": 0.5, "output": 0.8},
    memory_bandwidth=1e12,
    link_bandwidth=1e11,
    link_latency=1e-5,
)
MIDDLE = Machines(Link(1e10, 1e-4), frozenset({(0, 2), (0, 3), (1, 2), (1, 3)}))
"""Four pipeline ranks in two machines."""

LINE = [(rank, 0) for rank in range(4)]
V_SHAPE = [*LINE, *((3 - rank, 1) for rank in range(4))]
BYTES = 2 * 512 * 1024
NEAR, FAR = 1e-5 + BYTES / 1e11, 1e-4 + BYTES / 1e10


@pytest.mark.parametrize(
    ("stages", "hops"),
    [(LINE, [NEAR, FAR, NEAR]), (V_SHAPE, [NEAR, FAR, NEAR, NEAR, NEAR, FAR, NEAR])],
    ids=["line", "V"],
)
def test_the_hop_between_machines_takes_longer(
    stages: list[tuple[int, int]], hops: list[float]
) -> None:
    times = ModelTimes(SHAPE, DEVICE, machines=MIDDLE)
    costs = stage_costs(times, stages, TREATMENTS["vocab-2"]).costs([1] * len(stages))
    for k, hop in enumerate(hops):
        assert costs.of_comm(Comm("X", 5, k)) == pytest.approx(hop)
        assert costs.of_comm(Comm("G", 5, k + 1)) == pytest.approx(hop)
    assert costs.of_comm(Comm("C0", 5)) == pytest.approx(FAR)  # a collective at its slowest hop's


def test_machines_that_no_message_leaves_change_nothing() -> None:
    alone = stage_costs(ModelTimes(SHAPE, DEVICE), LINE, TREATMENTS["vocab-2"])
    near = replace(MIDDLE, crossing=frozenset())
    one = stage_costs(ModelTimes(SHAPE, DEVICE, machines=near), LINE, TREATMENTS["vocab-2"])
    assert alone == one


def test_layers_that_are_shared_over_the_network_wait_for_it() -> None:
    shape = replace(SHAPE, tensor=TensorSplit(2))
    near, far = (
        ModelTimes(shape, DEVICE, machines=replace(MIDDLE, tensor=tensor)).layer()
        for tensor in (False, True)
    )
    rounds = 4 * ((1e-4 + BYTES / 2 / 1e10) - (1e-5 + BYTES / 2 / 1e11))
    assert far["F"] - near["F"] == pytest.approx(rounds)


def test_the_simulator_takes_the_time_of_every_hop() -> None:
    plan = make_plan("1f1b", "none", 4, 4)
    costs = Costs({"F": 1.0, "B": 2.0}, {"X": [0.25, 3.0, 0.25], "G": [0.25, 3.0, 0.25]})
    line = simulate(lower(plan, costs), costs)
    took = {s.label: s.end - s.start for s in line.spans if s.lane == "comm"}
    assert took["X0 from 1"] == took["G0 from 2"] == pytest.approx(3)
    assert took["X0 from 0"] == took["X3 from 2"] == took["G1 from 1"] == pytest.approx(0.25)
    first = [line.compute(rank)[0].start for rank in range(4)]
    assert first == pytest.approx([0, 1.25, 5.25, 6.5])


def test_a_plan_made_with_the_boundary_is_no_slower_there() -> None:
    """Four ranks in two machines; the network takes as long as a forward."""
    slow: Any = {"X": [0.05, 1.0, 0.05], "G": [0.05, 1.0, 0.05]}
    passes: Any = {"F": 1.0, "B": 1.0, "W": 1.0, "S": 0.3, "T": 0.3, "IF": 0.05, "IB": 0.05}
    real = Costs(passes, slow)
    ends = [
        simulate(lower(make_plan("zb-h1", "vocab-2", 4, 12, costs=known), known), real).end
        for known in (Costs(passes), real)
    ]
    assert ends[1] < ends[0]


def test_a_hop_without_a_time_is_told() -> None:
    costs = Costs({"F": 1.0, "B": 1.0}, {"X": [1.0, 2.0]})
    with pytest.raises(ValueError, match=r"X has 2 times and none for hop 2, from stage 2 to 3"):
        costs.of_comm(Comm("X", 0, 2))


def test_hops_have_times_in_text_form() -> None:
    costs = parse_costs("F=1,B=1,p2p=0.1:2:0.1")
    assert [costs.of_comm(Comm("X", 0, k)) for k in range(3)] == [0.1, 2, 0.1]
    assert [costs.of_comm(Comm("G", 0, k)) for k in (1, 2, 3)] == [0.1, 2, 0.1]


def test_seconds_become_flops_at_the_rate_that_passes_attain() -> None:
    """A transfer is as long beside a forward on the notional device as on the GPU."""
    links = interconnect(GPUS["H100"], TREATMENTS["none"], network=(5e9, 1e-3))
    machines = Machines(links.notional_network, MIDDLE.crossing)
    treatment = TREATMENTS["none"]
    found = notional_costs(SHAPE, LINE, treatment, links.notional, machines).costs([1] * 4)
    assert links.rate == pytest.approx(GPUS["H100"].device(treatment).attained["forward"] * 989e12)
    far = 1e-3 + BYTES / 5e9
    assert found.of_comm(Comm("X", 0, 1)) == pytest.approx(far * links.rate)
    assert found.of_comm(Comm("X", 0, 0)) < found.of_comm(Comm("X", 0, 1))
    free = notional_costs(SHAPE, LINE, treatment).costs([1] * 4)
    assert found.passes == free.passes
    assert free.of_comm(Comm("X", 0, 1)) == 0
    assert (
        replace(links.notional, link_bandwidth=NOTIONAL.link_bandwidth, link_latency=0) == NOTIONAL
    )


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA T4", None),
    ],
)
def test_a_gpu_is_known_by_the_drivers_name(name: str, known: str | None) -> None:
    found = gpu_of_driver(name)
    assert (found.name if found else None) == known
