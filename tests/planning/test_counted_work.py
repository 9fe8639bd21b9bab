"""``auto`` and advice end by a count of work, so every machine has the same answer."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from time import monotonic

import pytest
from planning.test_dry_run import config, few, on

from megatron.planning.dry_run import dry_run
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.schedules.make_plan import find_plan
from megatron.schedules.request import Request
from megatron.schedules.search.watch import PLACEMENT, Watch
from megatron.schedules.settings import PlanSettings
from megatron.simulator.costs.gpus import gpu


def slow(seconds: float) -> Callable[[], float]:
    """The clock of a machine on which so many seconds pass from one look to the next."""
    ticks = count()
    return lambda: next(ticks) * seconds


def advised(run: RunConfig, seconds: float) -> RunConfig:
    planning = PlanSettings(advice_seconds=seconds)
    return replace(run, parallel=replace(run.parallel, planning=planning))


@pytest.mark.parametrize("limit", [0.5, 2.0])
def test_a_slow_machine_takes_the_same_plan(limit: float) -> None:
    run = on(few(config(2, "vocab-2", "auto")), "H100")
    plans = [
        make_run_plan(run, watch=Watch(clock=clock), seconds=limit)
        for clock in (monotonic, slow(1000.0))
    ]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("name", "schedule", "limit"), [("H100", "auto", 0.002), ("RTX4090", "gpipe", 3.0)]
)
def test_a_slow_machine_has_the_same_report(name: str, schedule: str, limit: float) -> None:
    """Of a run that fits with its table, and of a run that does not with its advice."""
    run = advised(few(config(2, "none", schedule)), limit)
    reports = [
        list(dry_run(run, gpu(name), Watch(clock=clock), seconds=limit))
        for clock in (monotonic, slow(1000.0))
    ]
    assert reports[0] == reports[1]
    assert f"work of about {limit:g} s" in "".join(reports[0]), "the limit was reached"


def test_a_limit_of_work_ends_a_search_whatever_the_clock_says() -> None:
    request = Request("zb-v", "vocab-2", 4, 24)
    free = Watch()
    plan = find_plan(request, free.counting(None)).plan
    few_trials = Watch(clock=slow(0.0)).counting(50 * PLACEMENT * sum(map(len, plan.rows)))
    assert not few_trials.is_over
    find_plan(request, few_trials)
    assert few_trials.was_cut


def test_work_of_a_part_counts_against_the_whole() -> None:
    whole = Watch(clock=slow(0.0)).counting(10.0)
    part = whole.part(4.0)
    part.did(3.0)
    assert (part.left, whole.left) == (1.0, 7.0)
    beside = whole.counting(5.0)
    whole.did(6.0)
    assert (beside.left, whole.left, part.left) == (0.0, 1.0, 0.0)
    assert beside.is_over
    assert beside.was_cut
    assert not whole.was_cut
    assert whole.part(4.0).seconds == 1.0
