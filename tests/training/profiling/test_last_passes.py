"""The last iterations of a run are recorded without being asked, and make its last screen."""

from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta

import pytest
from correctness.rank_runs import CPU, Batches, ListLoader
from correctness.short_runs import Job, Layout
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions

from megatron.parallel.groups import make_groups
from megatron.run.run_config import RunConfig
from megatron.schedules.plan import Plan
from megatron.simulator.simulate import Timeline
from megatron.training.end_of_run import last_screen
from megatron.training.iteration import run_iteration
from megatron.training.metrics.last_screen import LastScreen
from megatron.training.post_validated_step import make_train_step
from megatron.training.profiling.last_passes import KEPT, LastPasses
from megatron.training.setup import build_train_state

JOB = Job(GPTOptions(num_layers=4, vocab_size=61), microbatches=4, iterations=7)


@dataclass
class Run:
    """What one rank has at the end; ``short`` is the screen of a run of too few iterations."""

    timelines: dict[int, Timeline]
    plan: Plan
    screen: LastScreen | None
    short: LastScreen | None
    redone: list[int]


def run_recorded(rank: int, world_size: int, *, config: RunConfig, batches: Batches) -> Run:
    state = build_train_state(config, make_groups(config.parallel.grid, CPU, timedelta(seconds=60)))
    last = LastPasses(state)
    replica = (state.groups.data.rank, state.groups.data.size)
    step, loader = make_train_step(config.optimizer, state), ListLoader(batches, replica)
    redone = []
    for iteration in range(len(batches)):
        finished = run_iteration(
            step, config.optimizer, loader, state.groups, iteration, last.begin(None)
        )
        last.finished(iteration)
        if finished is not None and finished.step_redone:
            redone.append(iteration)
    step.settle()
    timelines = last.timelines()
    seconds = [(number, 0.5 * number) for number in range(1, 6)]
    screen = last_screen(config, state, seconds, timelines)
    short = last_screen(config, state, seconds[1:], timelines)
    state.pipeline.close()
    return Run(timelines, state.plan, screen, short, redone)


def recorded(ranks: RankPool, layout: Layout, *, post_validation: bool = False) -> list[Run]:
    config = JOB.config(layout)
    optimizer = replace(config.optimizer, post_validation=post_validation)
    config = replace(config, optimizer=optimizer)
    return ranks.run(run_recorded, layout.world_size, config=config, batches=JOB.batches())


@pytest.mark.parametrize(
    "layout", [Layout(2, "vocab-2"), Layout(2, "none"), Layout(1, "none", replicas=2)], ids=str
)
def test_every_pass_of_the_last_iterations_is_recorded_once(
    layout: Layout, ranks: RankPool
) -> None:
    first, *others = recorded(ranks, layout)
    assert list(first.timelines) == list(range(JOB.iterations - KEPT, JOB.iterations))
    planned = Counter((r, str(item)) for r, row in enumerate(first.plan.rows) for item in row)
    for timeline in first.timelines.values():
        spans = [span for span in timeline.spans if span.lane == "compute"]
        assert Counter((s.rank, s.label) for s in spans if s.kind != "U") == planned
        assert all(span.length > 0 for span in spans)
    assert all(own.timelines == first.timelines for own in others)


def test_the_screen_is_made_of_them(ranks: RankPool) -> None:
    run = recorded(ranks, Layout(2, "vocab-2"))[0]
    screen = run.screen
    assert run.short is None, "four iterations do not tell a speed"
    assert screen is not None
    assert (screen.seconds, screen.timed) == (1.5, (1, 5))
    assert list(screen.recorded) == [3, 4, 5, 6, 7]
    by_hand = []
    for timeline in run.timelines.values():
        own = [s for s in timeline.spans if s.lane == "compute"]
        begin, end = min(s.start for s in own), max(s.end for s in own)
        by_hand.append(1 - sum(s.length for s in own) / (2 * (end - begin)))
    assert screen.idle == pytest.approx(sum(by_hand) / KEPT)
    assert screen.predicted is not None
    assert screen.predicted.treatment == "none"
    assert screen.predicted.other > 0
    assert any("--vocab-parallel none" in line for line in screen.further)


def test_an_iteration_whose_forwards_ran_twice_is_left_out(ranks: RankPool) -> None:
    """Clipping at 0.5 is at work, so the guess that no step is clipped is wrong each time."""
    run = recorded(ranks, Layout(2, "vocab-2", "zb-h1"), post_validation=True)[0]
    kept = set(range(JOB.iterations - KEPT, JOB.iterations))
    assert run.redone
    assert set(run.timelines) == kept - set(run.redone)
