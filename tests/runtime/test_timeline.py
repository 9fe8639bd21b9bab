"""What is recorded is what happened, on one clock for all ranks, and all idle time has a cause."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import pytest
import torch
from correctness.rank_runs import CPU, make_pipeline_groups
from correctness.short_runs import Job, Layout
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions

from megatron.run.run_config import RunConfig
from megatron.runtime.batch import HostMicrobatch, to_device
from megatron.runtime.clocks import Offset, clock_offset, common_start
from megatron.runtime.observer import NamedRanges, Observer
from megatron.runtime.timeline import Recorder
from megatron.schedules.lower import Program, Wait
from megatron.schedules.needs import Comm
from megatron.schedules.passes import Pass
from megatron.simulator.compare import bubble
from megatron.simulator.simulate import Span, Timeline
from megatron.training.setup import build_train_state

AHEAD = 1000.0
"""Seconds by which the clock of each rank is ahead of the one before."""


def offset_of_shifted_clock(rank: int, world_size: int, *, ahead: float) -> tuple[Offset, float]:
    """Return the offset found, and the common start by the true clock."""
    groups = make_pipeline_groups()

    def clock() -> float:
        return time.perf_counter() + rank * ahead

    start, offset = common_start(groups, clock)
    assert clock_offset(groups.world_hosts, clock).error > 0 or rank == 0
    return offset, start - rank * ahead


def test_clocks_far_apart_are_aligned_within_the_error(ranks: RankPool) -> None:
    results = ranks.run(offset_of_shifted_clock, 3, ahead=AHEAD)
    for rank, (offset, start) in enumerate(results):
        assert abs(offset.seconds - rank * AHEAD) <= offset.error < AHEAD
        assert abs(start - results[0][1]) <= offset.error + 1e-6
    assert results[0][0] == Offset()


def test_processes_of_one_machine_have_one_clock(ranks: RankPool) -> None:
    results = ranks.run(offset_of_shifted_clock, 3, ahead=0.0)
    assert [offset.seconds for offset, _ in results] == [0.0] * 3
    assert len({start for _, start in results}) == 1


def record_all(recorder: Observer) -> None:
    comm = Comm("C1", 2)
    with recorder.span(Pass("F", 3, 1)):
        pass
    work = recorder.timed(comm, lambda: 7)
    with recorder.waiting(comm):
        assert work() == 7


def test_lanes_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is a second later than the one before."""
    ticks = itertools.count(100)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    recorder = Recorder(5, CPU)
    record_all(recorder)
    recorder.begin(start=90.0)  # at 107
    record_all(recorder)
    assert recorder.spans() == [
        Span(5, "compute", "F3.1", "F", 3, 1, 18.0, 19.0),
        Span(5, "comm", "C1 2", "C1", 2, 0, 21.0, 22.0),
        Span(5, "wait", "C1 2", "C1", 2, 0, 20.0, 23.0),
    ]


def test_a_pass_of_a_pair_gets_the_time_and_the_waits_of_its_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B begins, right after 1, F goes on at 3, B at 4 and waits from 5 to 6, F from 7 to 8."""
    ticks = itertools.count(100)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    recorder = Recorder(5, CPU)
    forward, backward = Pass("F", 3, 1), Pass("B", 1)
    with recorder.pair(forward, backward) as began:
        for item in (backward, forward, backward):
            began(item)
        with recorder.within():
            pass
        began(forward)
    assert recorder.spans() == [
        Span(5, "compute", "F3.1", "F", 3, 1, 1.0, 3.0, beside="B1"),
        Span(5, "compute", "B1", "B", 1, 0, 3.0, 8.0, beside="F3.1"),
    ]
    assert recorder.waits_within() == [0.0, 1.0]


@pytest.mark.parametrize("recorded", [False, True])
def test_a_profile_has_the_names(recorded: bool) -> None:
    recorder = Recorder(0, CPU)
    named = NamedRanges(CPU, recorder if recorded else None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        record_all(named)
    assert {"F3.1", "C1 2", "wait C1 2"} <= {event.key for event in profile.key_averages()}
    assert [span.lane for span in recorder.spans()] == ["compute", "comm", "wait"] * recorded


@dataclass(frozen=True)
class Recorded:
    """What one rank has recorded.

    Attributes:
        program: that ran.
        timeline: of all ranks.
    """

    program: Program
    timeline: Timeline


def record(
    rank: int, world_size: int, *, config: RunConfig, batch: Sequence[HostMicrobatch]
) -> Recorded:
    state = build_train_state(config, make_pipeline_groups())
    recorder = Recorder(rank, CPU)
    recorder.begin(common_start(state.groups)[0])
    state.pipeline.train(to_device(batch, CPU), 0, recorder)
    timeline = state.pipeline.timeline(recorder)
    state.pipeline.close()
    return Recorded(state.pipeline.train_program, timeline)


@pytest.mark.parametrize("layout", [Layout(2, "none"), Layout(3, "vocab-2", "zb-h1")], ids=str)
def test_every_wait_of_the_program_is_recorded_and_idle_time_has_a_cause(
    layout: Layout, ranks: RankPool
) -> None:
    job = Job(GPTOptions(num_layers=3, vocab_size=61), microbatches=4, iterations=1)
    config = job.config(layout)
    recorded = ranks.run(record, layout.ranks, config=config, batch=job.batches()[0])[0]
    for rank, row in enumerate(recorded.program.rows):
        waits = [wait for wait in recorded.timeline.waits if wait.rank == rank]
        assert [w.label for w in waits] == [str(s.comm) for s in row if isinstance(s, Wait)]
        causes = bubble(recorded.timeline, rank)
        assert min(astuple(causes)) >= -1e-9
        work = recorded.timeline.work(rank)
        assert work > 0
        assert sum(astuple(causes)) < 1
