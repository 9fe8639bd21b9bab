"""A race finds the fastest schedule, and plans few of those that take part."""

from dataclasses import dataclass, field
from io import StringIO
from typing import Any, cast

import pytest
from harness.marks import full
from hypothesis import given
from hypothesis import strategies as st
from planning.test_dry_run import config, on, with_microbatches

from megatron.planning.candidate import Candidate
from megatron.planning.known import NEAR, Known
from megatron.planning.race import Race, chosen
from megatron.planning.run_memory import Fullest
from megatron.planning.run_plan import candidates
from megatron.schedules.search.watch import Watch


@dataclass(eq=False)
class Contender:
    """A schedule of which everything is known beforehand."""

    least_time: float
    slack: float
    error: float
    peak: float
    fits: bool = True
    schedule: str = "1f1b"
    treatment: str = "none"
    gpu: str = "A100"
    watch: Watch = field(default_factory=Watch)
    is_planned: bool = False
    is_estimated: bool = False

    @property
    def named(self) -> str:
        return f"{self.schedule} with {self.treatment}"

    @property
    def time(self) -> float:
        return self.least_time * (1 + self.slack)

    @property
    def known(self) -> Known:
        held = Fullest(0, self.peak, 0.0)
        if self.is_planned:
            return Known("plan", self.time, held, self.fits, 16)
        if self.is_estimated:
            seconds = max(self.time * (1 + self.error), self.least_time)
            return Known("estimate", seconds, held, self.fits, 5)
        return Known("bound", self.least_time, Fullest(0, 0.0, 0.0), True)

    def look(self, watch: Watch) -> None:
        if self.is_estimated:
            self.tell()
        self.is_estimated = True

    def tell(self) -> None:
        self.is_planned = True


def contenders(error: Any) -> Any:
    bounds, slacks = st.floats(1, 1.1), st.floats(0, 0.1)
    made = st.builds(Contender, bounds, slacks, error, st.integers(1, 9), st.booleans())
    return st.lists(made, min_size=1, max_size=9)


def race(taking_part: list[Contender], comparing: Watch | None = None) -> Race:
    return Race(cast("list[Candidate]", taking_part), comparing or Watch())


@given(taking_part=contenders(st.floats(-0.1, NEAR)))
def test_none_is_much_faster_unless_estimates_are_too_high(taking_part: list[Contender]) -> None:
    """The estimate of the schedule that is taken, and of the fastest, may each add its error."""
    taken = race(taking_part).winner()
    fitting = [each for each in taking_part if each.fits]
    if not fitting:
        assert taken is None
        assert any(each.is_planned for each in taking_part)
        return
    assert taken is not None
    assert taken.fits
    assert taken.is_planned
    assert taken.time * (1 - NEAR) ** 2 <= min(each.time for each in fitting) * (1 + 1e-9)


@given(taking_part=contenders(st.just(0.0)))
def test_exact_estimates_take_at_most_two_plans(taking_part: list[Contender]) -> None:
    taken = race(taking_part).winner()
    planned = [each for each in taking_part if each.is_planned]
    if taken is not None:
        assert len(planned) <= 2
        least = min(each.time for each in taking_part if each.fits)
        assert taken.time * (1 - NEAR) <= least * (1 + 1e-9)
        near = [each for each in planned if each.time * (1 - NEAR) <= least]
        assert all(taken.peak <= each.peak for each in near)


@given(taking_part=contenders(st.just(0.0)))
def test_if_none_fits_the_smallest_is_planned(taking_part: list[Contender]) -> None:
    for each in taking_part:
        each.fits = False
    assert race(taking_part).winner() is None
    planned = [each.peak for each in taking_part if each.is_planned]
    assert min(planned) == min(each.peak for each in taking_part)


def test_what_cannot_be_faster_is_not_looked_at() -> None:
    fast, slow = Contender(1.0, 0.0, 0.0, 1.0), Contender(1.0, 0.0, 0.0, 1.0)
    slow.least_time = 1.2
    assert cast("Contender", race([slow, fast]).winner()) is fast
    assert not slow.is_estimated
    assert not slow.is_planned


def test_when_the_time_is_up_the_best_so_far_is_taken_and_the_others_are_named() -> None:
    first = Contender(1.0, 0.05, 0.0, 1.0, schedule="zb-v")
    other = Contender(1.001, 0.0, 0.0, 1.0, schedule="hanayo", treatment="vocab-2")
    running = race([first, other], Watch(0.0))
    assert cast("Contender", running.winner()) is first
    assert not other.is_estimated
    assert "not compared: hanayo with vocab-2; --search-seconds N" in running.consequence()


def test_a_comparison_with_little_time_says_so() -> None:
    stream = StringIO()
    run = with_microbatches(on(config(2, "none", "auto"), "A100"), 16)
    compared = candidates(run, watch=Watch(None, stream))
    taken = chosen(compared, 0.0)
    assert taken.fits
    assert (
        "the search ends after work of about 0 s: the best schedule so far is taken"
        in stream.getvalue()
    )
    assert "--search-seconds N gives more time" in stream.getvalue()


def test_the_own_limit_of_a_search_is_that_of_the_comparison() -> None:
    run = with_microbatches(on(config(2, "none", "auto"), "A100"), 16)
    compared = candidates(run, watch=Watch(0.0))
    assert chosen(compared, 3600.0).fits
    assert sum(each.is_planned for each in compared) < len(compared)
    assert compared[0].watch.was_cut


@pytest.mark.parametrize(
    ("ranks", "vocabulary", "microbatches", "name"),
    [
        (2, "none", 12, "A100"),
        full(2, "vocab-1", 16, "H100"),
        full(2, "vocab-2", 16, "A100"),
        full(4, "none", 24, "H100"),
        full(4, "redis", 24, "A100"),
        full(4, "vocab-2", 24, "A100"),
        full(4, "interlaced", 24, "H100"),
        full(4, "vocab-1", 48, "H100"),
    ],
)
def test_it_takes_what_planning_all_in_full_takes(
    ranks: int, vocabulary: str, microbatches: int, name: str
) -> None:
    """Or a schedule whose time is within ``NEAR`` of that one's."""
    compared = candidates(
        with_microbatches(on(config(ranks, vocabulary, "auto"), name), microbatches)
    )
    taken = chosen(compared)
    assert sum(each.is_planned for each in compared) < len(compared)
    fitting = [each for each in compared if each.fits]
    assert taken in fitting
    assert taken.time * (1 - NEAR) <= min(each.time for each in fitting)
