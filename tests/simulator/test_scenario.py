"""From a case to its figures: what the options mean, and which of them make no case."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.schedules.costs import Costs
from megatron.schedules.make_plan import make_plan
from megatron.schedules.request import Request
from megatron.simulator.costs.cost_file import DEFAULT_COSTS
from megatron.simulator.scenario import Scenario, run

UNSPLIT = Costs({"F": 1, "B": 2, "S": 0, "E": 0, "T": 0, "IF": 0, "IB": 0})


def case(schedule: str = "1f1b", vocabulary: str = "none", **fields: Any) -> Scenario:
    own = {name: fields.pop(name) for name in list(fields) if name in Scenario.__dataclass_fields__}
    return Scenario(
        Request(schedule, vocabulary, 4, 8, **{"costs": DEFAULT_COSTS, **fields}), **own
    )


def test_costs_are_those_of_a_chunk_but_those_of_auto_of_a_rank() -> None:
    """The best of all without a limit has two chunks a rank here: half the time each."""
    done = run(case("zb-v"))
    assert done.timeline.work(0) == pytest.approx(8 * 2 * 3)
    best = run(case("auto"))
    assert best.timeline.work(0) == pytest.approx(8 * 3)
    halved = DEFAULT_COSTS.per_chunk(2)
    assert best.timeline.end <= run(case("zb-v", costs=halved)).timeline.end + 1e-9


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_redistribution_shortens_what_the_output_layer_makes_long(schedule: str) -> None:
    ends = {
        vocabulary: run(case(schedule, vocabulary, output_layer=1.2)).timeline.end
        for vocabulary in ("none", "redis", "vocab-2")
    }
    assert ends["vocab-2"] < ends["redis"] < ends["none"]


def test_without_an_output_layer_there_is_nothing_to_redistribute() -> None:
    assert run(case(vocabulary="redis")).timeline == run(case()).timeline


def test_more_layers_balance_more_finely() -> None:
    ends = [run(case(vocabulary="redis", output_layer=0.7, layers=n)).timeline.end for n in (8, 80)]
    assert ends[1] < ends[0]


def test_layers_of_the_last_stage() -> None:
    done = run(case(vocabulary="redis", layers=16, last_stage_layers=1))
    assert [done.timeline.work(rank) for rank in range(4)] == pytest.approx([30, 30, 30, 6])


def test_a_plan_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.txt"
    path.write_text(make_plan("1f1b", "vocab-1", 4, 8).to_text())
    loaded = run(case("file", "vocab-1", file=path, output_layer=1.0))
    assert loaded.plan.to_text() == path.read_text()
    assert loaded.timeline.work(0) == pytest.approx(8 * (3 + 3 / 4))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (case(costs=Costs({"F": [1, 2], "B": 1})), "F has 2 times for 4 ranks"),
        (case(costs=Costs({"F": [1] * 5, "B": 1})), "F has 5 times for 4 ranks"),
        (case("zb-v", costs=Costs({"F": 1, "B": 1, "W": [[1]] * 4})), "none for chunk 1"),
        (case(costs=Costs({"F": [[1, 2]] * 4, "B": 2})), "F has 2 times for 1 chunk of"),
        (case(costs=Costs({"F": 1})), "no cost is given for B"),
        (case("zb-h1", costs=UNSPLIT), "zb-h1 splits the backward, and the costs have no W"),
        (case(costs=UNSPLIT, split_backward=True), "1f1b splits the backward"),
        (case(costs=Costs({"F": 0, "B": 0})), "nothing takes time"),
        (case(layers=8), "'none' leaves the layers evenly spread"),
        (case("auto", output_layer=1.0), "'auto' compares schedules whose last stages"),
        (case(vocabulary="redis", layers=8, last_stage_layers=9), "cannot have 9 of 8 layers"),
        (case("zb-h2", memory_limit=4), "more than the memory limit of 4"),
    ],
)
def test_what_makes_no_simulation_is_refused(wrong: Scenario, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run(wrong)


def test_a_bound_comes_with_the_optimum() -> None:
    pytest.importorskip("ortools")
    small = case("optimal", seconds=5)
    done = run(replace(small, request=replace(small.request, ranks=2, microbatches=2)))
    assert done.bound is not None
    assert 0 < done.bound <= done.timeline.end + 1e-9
