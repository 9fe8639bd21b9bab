"""Predictions: bounds that hold, and the best job that fits."""

from dataclasses import replace

import pytest
from harness.marks import full

from megatron.schedules.catalogue import SCHEDULES
from megatron.schedules.costs import Costs
from megatron.schedules.timing import earliest
from megatron.simulator.costs.shape import Shape
from tools.predictions.predict import PipelineJob, best
from tools.synthetic_runs import DEVICE

JOB = PipelineJob(Shape(1024, 16, 512, 50_000), 16, ranks=4, microbatches=8, device=DEVICE)


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize(
    "treatment", [full("none"), full("vocab-1"), "vocab-2", full("interlaced")]
)
def test_no_plan_beats_the_bound(schedule: str, treatment: str) -> None:
    job = replace(JOB, schedule=schedule, vocabulary=treatment, ranks=3, microbatches=5)
    assert job.time >= job.least_time * (1 - 1e-9)
    assert len(job.forecast.peak) == 3


def test_the_bound_of_1f1b_is_its_time_on_equal_stages() -> None:
    """Where no stage has anything but layers, messages apart."""
    job = replace(JOB, shape=Shape(1024, 16, 512, 1), device=replace(DEVICE, overhead={}))
    instant = Costs(job.costs.passes)
    assert job.least_time == pytest.approx(earliest(job.plan(), instant).end, rel=1e-3)


def test_mfu_by_hand() -> None:
    """One rank has no bubble: its MFU is the ideal one of its passes."""
    job = replace(JOB, ranks=1)
    assert job.time == pytest.approx(job.least_time)
    forward = 512 * 1024 * (16 * (24 * 1024 + 4 * 512) + 2 * 50_000)
    assert job.forecast.mfu == pytest.approx(3 * 8 * forward / (200e12 * job.time))


def test_the_best_is_the_fastest_that_fits() -> None:
    jobs = [
        replace(JOB, schedule=schedule, vocabulary=treatment)
        for schedule in ("1f1b", "zb-h1", "gpipe")
        for treatment in ("none", "vocab-2")
    ]
    found = best(jobs)
    assert found is not None
    assert found.time == min(job.time for job in jobs)
    limit = min(job.peak for job in jobs)
    fits = best(jobs, limit)
    assert fits is not None
    assert fits.peak == limit
    assert best(jobs, limit - 1) is None


def test_redis_moves_layers_and_the_others_do_not() -> None:
    assert JOB.stage_layers == (4, 4, 4, 4)
    redis = replace(JOB, vocabulary="redis")
    assert redis.stage_layers[-1] < 4
    assert redis.time < JOB.time
    given = replace(redis, last_stage_layers=1).stage_layers
    assert (given[-1], sum(given)) == (1, 16)
