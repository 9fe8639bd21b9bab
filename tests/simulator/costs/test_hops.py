"""Every hop from stage to stage has a time of its own, in plans, files and the simulator."""

from typing import Any

import pytest

from megatron.schedules.costs import Costs
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import Comm
from megatron.simulator.costs.cost_file import parse_costs
from megatron.simulator.costs.gpus import gpu_of_driver
from megatron.simulator.simulate import simulate


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


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GB300", "GB300"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA T4", None),
    ],
)
def test_a_gpu_is_known_by_the_drivers_name(name: str, known: str | None) -> None:
    found = gpu_of_driver(name)
    assert (found.name if found else None) == known
