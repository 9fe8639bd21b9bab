"""What a run records of its plan before the first iteration."""

import pytest

from megatron.planning.planned_run import RunPlan
from megatron.schedules.costs import UNIT_COSTS
from megatron.schedules.make_plan import make_plan
from megatron.training.metrics import introduce
from megatron.training.metrics.introduce import planned_idle


def run_plan(ranks: int, microbatches: int) -> RunPlan:
    plan = make_plan("1f1b", "none", ranks, microbatches)
    return RunPlan(plan, (1,) * ranks, UNIT_COSTS, "1f1b")


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 4), (4, 8)])
def test_the_planned_idle_share_is_that_of_1f1b(ranks: int, microbatches: int) -> None:
    """Equation of arXiv 2104.04473, section 2.2.1, as a share of the whole time."""
    expected = (ranks - 1) / (microbatches + ranks - 1)
    assert planned_idle(run_plan(ranks, microbatches)) == pytest.approx(expected)


def test_of_a_large_plan_it_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(introduce, "MOST_PASSES", 15)
    assert planned_idle(run_plan(2, 4)) is None
    monkeypatch.setattr(introduce, "MOST_PASSES", 16)
    assert planned_idle(run_plan(2, 4)) is not None
