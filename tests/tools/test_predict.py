"""Predictions: bounds that hold, and the best job that fits."""

from dataclasses import replace

import pytest

from megatron.schedules.catalogue import SCHEDULES
from megatron.schedules.costs import Costs
from megatron.schedules.timing import earliest
from megatron.simulator.costs.shape import Shape
from tools.predictions.predict import PipelineJob, best
from tools.synthetic_runs import DEVICE

JOB = PipelineJob(Shape(1024, 16, 512, 50_000), 16, ranks=4, microbatches=8, device=DEVICE)


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("treatment", ["none", "vocab-1", "vocab-2", "interlaced"])
def test_no_plan_beats_the_bound(schedule: str, treatment: str) -> None:
    job = replace(JOB, schedule=schedule, vocabulary=treatment, ranks=3, microbatches=5)
    prediction = job.predict()
    assert prediction.seconds >= job.least_seconds() * (1 - 1e-9)
    assert len(prediction.peak_bytes) == 3


def test_the_bound_of_1f1b_is_its_time_on_equal_stages() -> None:
    """Where no stage has anything but layers, messages apart."""
    job = replace(JOB, shape=Shape(1024, 16, 512, 1), device=replace(DEVICE, overhead={}))
    instant = Costs(job.costs.passes)
    assert job.least_seconds() == pytest.approx(earliest(job.plan(), instant).end, rel=1e-3)


def test_mfu_by_hand() -> None:
    """One rank has no bubble: its MFU is the ideal one of its passes."""
    job = replace(JOB, ranks=1)
    prediction = job.predict()
    assert prediction.seconds == pytest.approx(job.least_seconds())
    forward = 512 * 1024 * (16 * (24 * 1024 + 4 * 512) + 2 * 50_000)
    assert prediction.mfu == pytest.approx(3 * 8 * forward / (200e12 * prediction.seconds))


def test_the_best_is_the_fastest_that_fits() -> None:
    jobs = [
        replace(JOB, schedule=schedule, vocabulary=treatment)
        for schedule in ("1f1b", "zb-h1", "gpipe")
        for treatment in ("none", "vocab-2")
    ]
    all_ = [job.predict() for job in jobs]
    found = best(jobs)
    assert found is not None
    assert found.seconds == min(prediction.seconds for prediction in all_)
    limit = min(max(prediction.peak_bytes) for prediction in all_)
    fits = best(jobs, limit)
    assert fits is not None
    assert max(fits.peak_bytes) == limit
    assert best(jobs, limit - 1) is None


def test_redis_moves_layers_and_the_others_do_not() -> None:
    assert JOB.stage_layers == [4, 4, 4, 4]
    redis = replace(JOB, vocabulary="redis")
    assert redis.stage_layers[-1] < 4
    assert redis.predict().seconds < JOB.predict().seconds
    given = replace(redis, last_stage_layers=1).stage_layers
    assert (given[-1], sum(given)) == (1, 16)
