"""A plan of few microbatches tells the time and memory of a plan of many."""

from dataclasses import replace

import pytest
from harness.marks import full
from planning.test_dry_run import config

from megatron.planning.estimate import planned_microbatches
from megatron.planning.forecast_run import forecast_run
from megatron.planning.run_plan import asked
from megatron.schedules.catalogue import SCHEDULES
from megatron.schedules.search.watch import Watch
from megatron.schedules.settings import SliceSettings
from megatron.simulator.costs.gpus import gpu

QUICK = ("1f1b", "interleaved", "zb-h1")


@pytest.mark.parametrize("vocabulary", ["none", full("vocab-2")])
@pytest.mark.parametrize(
    "schedule", [name if name in QUICK else full(name) for name in SCHEDULES if name != "gpipe"]
)
def test_it_is_near_the_forecast_of_all_microbatches(schedule: str, vocabulary: str) -> None:
    """The two plans are searched for apart, so that one of them may be better."""
    run = config(3, vocabulary, schedule)
    run = replace(run, train=replace(run.train, global_batch_size=2 * 22))
    [candidate] = asked(run)
    found = candidate.estimate(Watch(), gpu("A100"))
    whole = forecast_run(run, candidate.run_plan, gpu("A100"))
    assert found.planned < found.microbatches == 22
    assert found.seconds == pytest.approx(whole.outcome.seconds, rel=0.03)
    assert found.samples_per_second == pytest.approx(whole.samples_per_second, rel=0.03)
    assert found.mfu == pytest.approx(whole.outcome.mfu, rel=0.03)
    assert found.fullest.peak == pytest.approx(whole.fullest.peak, rel=0.05)


@pytest.mark.parametrize("schedule", ["1f1b", full("interleaved"), full("zb-v")])
@pytest.mark.parametrize("slices", [4, full(2)])
def test_of_slices_it_is_near_the_forecast_of_all_microbatches(schedule: str, slices: int) -> None:
    """Two rounds of slices are few microbatches, and neither plan is searched for."""
    run = config(4, "vocab-2", schedule)
    parallel = replace(run.parallel, slices=SliceSettings(slices))
    run = replace(run, parallel=parallel, train=replace(run.train, global_batch_size=2 * 22))
    [found] = asked(run)
    candidate = replace(found, request=replace(found.request, shortened=False))
    few = candidate.estimate(Watch(), gpu("A100"))
    whole = forecast_run(run, candidate.run_plan, gpu("A100"))
    assert few.planned <= 2 * 4 // slices + 2
    assert few.seconds == pytest.approx(whole.outcome.seconds, rel=0.01)
    assert few.fullest.peak == pytest.approx(whole.fullest.peak, rel=0.01)


def test_of_few_microbatches_it_is_the_forecast() -> None:
    run = config(4, "vocab-2", "zb-h1")
    [candidate] = asked(run)
    found = candidate.estimate(Watch(), gpu("A100"))
    whole = forecast_run(run, candidate.run_plan, gpu("A100"))
    assert (found.seconds, found.fullest) == (whole.outcome.seconds, whole.fullest)
    assert not found.cut


@pytest.mark.parametrize("m", [17, 64, 66, 255])
def test_how_many_microbatches_are_planned(m: int) -> None:
    def planned(schedule: str) -> int:
        run = config(8, "none", schedule)
        run = replace(run, train=replace(run.train, global_batch_size=2 * m))
        run = replace(run, model=replace(run.model, num_layers=32))
        return planned_microbatches(asked(run)[0].request)

    assert planned("1f1b") == 17
    assert planned("gpipe") == m, "it holds them all"
    assert (m - planned("interleaved")) % 8 == 0
    assert 17 <= planned("interleaved") <= min(m, 24)
    assert planned("zb-2p") == min(m, 38), "16 of which 43 % are kept"
