"""A slow rank is named with the part of its work in which it is slow, whatever its stages are."""

import time
from collections.abc import Callable
from unittest.mock import patch

import pytest
from correctness.rank_runs import Batches, ListLoader, make_pipeline_groups
from correctness.short_runs import Job, Layout
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions

from megatron.run.run_config import RunConfig
from megatron.runtime.stage_passes import StagePasses
from megatron.schedules.passes import Pass
from megatron.simulator.simulate import Span
from megatron.training.guard.stragglers import StragglerWatch, Times, compare, median_times, report
from megatron.training.iteration import run_iteration
from megatron.training.post_validated_step import make_train_step
from megatron.training.setup import build_train_state

Work = Callable[[StagePasses, Pass], None]

JOB = Job(GPTOptions(num_layers=4, vocab_size=61), microbatches=4, iterations=2)


def test_updates_of_buckets_are_left_out_as_no_plan_expects_them() -> None:
    def span(kind: str, lane: str, start: float, end: float) -> Span:
        return Span(0, lane, f"{kind}0", kind, 0, 0, start, end)

    spans = [span("U", "compute", 0, 9), span("F", "compute", 9, 11), span("RG", "comm", 0, 5)]
    assert median_times(spans) == {("F", 0): 2}


def forward(*seconds: float) -> list[Times]:
    """A time of F for every rank."""
    return [{("F", 0): value} for value in seconds]


def test_unequal_stages_are_no_stragglers() -> None:
    """The plan's unit does not matter."""
    compared = compare(forward(1e-3, 2e-3, 3e-3), forward(10, 20, 30))
    assert [slow.by_plan for slow in compared] == pytest.approx([1, 1, 1])
    assert {slow.rank: slow.by_median for slow in compared} == pytest.approx({0: 0.5, 1: 1, 2: 1.5})
    [line] = report(7, compared)
    assert line.startswith("no straggler in iteration 7; the slowest is rank 0: F takes 1.0 ms")


def test_who_is_slower_than_planned_is_told_also_if_faster_than_the_others() -> None:
    compared = compare(forward(2e-3, 2e-3, 3e-3, 3e-3), forward(10, 20, 30, 30))
    [line] = report(7, compared)
    assert line == (
        "straggler in iteration 7: rank 0: F takes 2.0 ms, 0.80 times the median of ranks, "
        "2.00 times the plan"
    )


def test_a_part_that_few_ranks_have_is_compared_among_them() -> None:
    measured: list[Times] = [{("F", 0): 1.0}, {("F", 0): 1.0, ("T", 0): 5.0}, {("T", 0): 5.0}]
    compared = compare(measured, measured)
    assert sorted((slow.rank, slow.part[0]) for slow in compared) == [
        (0, "F"),
        (1, "F"),
        (1, "T"),
        (2, "T"),
    ]
    assert all(slow.by_plan == 1 for slow in compared)


def slowed(work: Work, is_slow: bool) -> Work:
    def slow(passes: StagePasses, item: Pass) -> None:
        time.sleep(0.2 * is_slow)
        work(passes, item)

    return slow


def train_with_a_straggler(
    rank: int, world_size: int, *, config: RunConfig, batches: Batches
) -> list[str]:
    """Two iterations, of which the second is timed; B of rank 1 sleeps."""
    with patch.object(StagePasses, "backward", slowed(StagePasses.backward, rank == 1)):
        state = build_train_state(config, make_pipeline_groups())
    said: list[str] = []
    watch, loader = StragglerWatch(2, state, said.append), ListLoader(batches)
    step = make_train_step(config.optimizer, state)
    for iteration in range(2):
        observer = watch.begin(iteration)
        assert (observer is not None) == watch.times(iteration) == (iteration == 1)
        run_iteration(step, config.optimizer, loader, state.groups, iteration, observer)
        watch.finished(iteration)
    state.pipeline.close()
    return said


def test_a_rank_that_sleeps_in_a_pass_is_found(ranks: RankPool) -> None:
    config, batches = JOB.config(Layout(2, "vocab-2")), JOB.batches()
    results = ranks.run(train_with_a_straggler, 2, config=config, batches=batches)
    assert results[0] == results[1]
    assert any(line.startswith("straggler in iteration 2: rank 1: B ") for line in results[0])
    assert not any("rank 0: B" in line for line in results[0] if line.startswith("straggler"))
