"""Memory and idle shares of all ranks, gathered from what each has measured of itself."""

import pytest
import torch
from correctness.rank_runs import make_pipeline_groups
from harness.rank_pool import RankPool

from megatron.parallel.groups import single_rank
from megatron.runtime.timeline import Recorder
from megatron.schedules.needs import Comm, CommKind
from megatron.schedules.passes import PLANNED_KINDS, Pass
from megatron.training.metrics.peak_memory import PeakMemory
from megatron.training.metrics.rank_figures import WAITS, PassTimes, gather_figures, pass_times
from megatron.training.metrics.records import RankFigures

CPU = torch.device("cpu")


def figures_on_rank(
    rank: int, world_size: int, *, passes: list[PassTimes | None]
) -> tuple[RankFigures, ...]:
    memory = PeakMemory(1000 * (rank + 1), 2000 if rank else None)
    return gather_figures(make_pipeline_groups(), memory, passes[rank])


def test_every_rank_has_the_figures_of_all(ranks: RankPool) -> None:
    """Rank 0 is busy for 3 of the 4 s that rank 1 needs, although it is done after 3.5 s."""
    passes = [
        PassTimes(3.0, 3.5, (0.25, 0.0, 0.0, 0.0)),
        PassTimes(2.0, 4.0, (0.5, 1.0, 0.25, 0.125), computing(F=0.5, B=1.25)),
    ]
    one, other = ranks.run(figures_on_rank, 2, passes=passes)
    waits = {"stages": 0.0625, "vocabulary": 0.0, "replicas": 0.0, "copies": 0.0}
    first = RankFigures(0, 1000, None, 0.25, {**waits, "end": 0.125, "other": 0.0625})
    waits = {"stages": 0.125, "vocabulary": 0.25, "replicas": 0.0625, "copies": 0.03125}
    reasons = {**waits, "end": 0.0, "other": 0.03125}
    second = RankFigures(1, 2000, 2000, 0.5, reasons, {"F": 0.5, "B": 1.25})
    assert one == other == (first, second)
    assert all(sum(own.idle_by_reason.values()) == own.idle for own in one)


def test_a_rank_that_has_measured_nothing_has_no_share(ranks: RankPool) -> None:
    one, other = ranks.run(figures_on_rank, 2, passes=[None, PassTimes(2.0, 4.0)])
    assert one == other
    assert [rank.idle for rank in one] == [None, 0.5]
    assert one[0].idle_by_reason == {}


def computing(**seconds: float) -> tuple[float, ...]:
    return tuple(seconds.get(kind, 0.0) for kind in PLANNED_KINDS)


class Moments:
    """Stands in for the ``time`` module; tells the moments that it is given."""

    def __init__(self, *moments: float) -> None:
        self._moments = iter(moments)

    def perf_counter(self) -> float:
        return next(self._moments)


def test_the_time_goes_from_the_first_wait_to_the_last_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It begins at 10; waits from 11 to 13; passes from 13 to 15 and 18 to 19; waits to 25."""
    origin, wait, passes, last = (10.0,), (11.0, 13.0), (13.0, 15.0, 18.0, 19.0), (19.0, 25.0)
    clock = Moments(*origin, *wait, *passes, *last)
    monkeypatch.setattr("megatron.runtime.timeline.time", clock)
    recorder = Recorder(0, CPU)
    with recorder.waiting(Comm("C0", 0, 0)):
        pass
    for item in (Pass("F", 0), Pass("B", 0)):
        with recorder.span(item):
            pass
    with recorder.waiting(Comm("C0", 0, 0)):
        pass
    assert pass_times(recorder) == (3.0, 8.0, (0.0, 2.0, 0.0, 0.0), computing(F=2.0, B=1.0))


def test_of_an_iteration_that_ran_twice_the_second_run_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Post-validation: passes from 10 to 11 and 11 to 12 for nothing; a wait from 13 to 14."""
    first, wait, second = (10.0, 11.0, 11.0, 12.0), (13.0, 14.0), (14.0, 16.0, 17.0, 20.0)
    clock = Moments(10.0, *first, *wait, *second)
    monkeypatch.setattr("megatron.runtime.timeline.time", clock)
    recorder = Recorder(0, CPU)
    for run in range(2):
        for item in (Pass("F", 0), Pass("B", 0)):
            with recorder.span(item):
                pass
        if run == 0:
            with recorder.waiting(Comm("C0", 0, 0)):
                pass
    assert pass_times(recorder) == (5.0, 7.0, (0.0, 1.0, 0.0, 0.0), computing(F=2.0, B=3.0))


def test_a_wait_within_a_pass_is_no_computing_and_an_update_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It begins at 0. F waits from 2 to 4 and from 5 to 6. In a pair B waits from 11 to 15."""
    forward, update = (1.0, 2.0, 4.0, 5.0, 6.0, 9.0), (20.0, 22.0)
    pair = (10.0, 10.0, 11.0, 15.0, 17.0, 20.0)  # F goes on at 17
    clock = Moments(0.0, *forward, *pair, *update)
    monkeypatch.setattr("megatron.runtime.timeline.time", clock)
    recorder = Recorder(0, CPU)
    with recorder.span(Pass("F", 0)):
        for _ in range(2):
            with recorder.within():
                pass
    forward_of_pair, backward = Pass("F", 1), Pass("B", 0)
    with recorder.pair(forward_of_pair, backward) as began:
        began(backward)
        with recorder.within():
            pass
        began(forward_of_pair)
    with recorder.span(Pass("U", 0)):
        pass
    assert recorder.waits_within() == [3.0, 0.0, 4.0, 0.0]
    found = pass_times(recorder)
    assert found is not None
    assert (found.busy, found.computing) == (20.0, computing(F=5.0 + 3.0, B=3.0))


def test_without_passes_there_is_no_time() -> None:
    assert pass_times(Recorder(0, CPU)) is None


def test_a_single_rank_needs_no_group() -> None:
    [own] = gather_figures(single_rank(CPU), PeakMemory(5), PassTimes(1.0, 2.0))
    waits = {"stages": 0.0, "vocabulary": 0.0, "replicas": 0.0, "copies": 0.0}
    assert own == RankFigures(0, 5, None, 0.5, {**waits, "end": 0.0, "other": 0.5})


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("X", "stages"), ("G", "stages"), ("C1", "vocabulary"), ("CIB", "vocabulary"),
     ("RG", "replicas"), ("AG", "replicas"), ("O", "copies"), ("L", "copies")],
)  # fmt: skip
def test_a_wait_has_the_reason_of_its_communication(
    kind: CommKind, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins at 0; waits from 1 to 3; a pass from 3 to 4."""
    monkeypatch.setattr("megatron.runtime.timeline.time", Moments(0.0, 1.0, 3.0, 3.0, 4.0))
    recorder = Recorder(0, CPU)
    with recorder.waiting(Comm(kind, 0, 0)):
        pass
    with recorder.span(Pass("F", 0)):
        pass
    found = pass_times(recorder)
    assert found is not None
    assert dict(zip(WAITS, found.waits, strict=True)) == {
        own: 2.0 * (own == reason) for own in WAITS
    }
