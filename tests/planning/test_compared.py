"""No plan is taken that the table of its own comparison dominates."""

from dataclasses import dataclass, field
from itertools import repeat
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from megatron.planning.candidate import Candidate
from megatron.planning.compared import completed
from megatron.planning.known import NEAR, Known, Level
from megatron.planning.run_memory import Fullest
from megatron.schedules.search.watch import Watch


@dataclass(eq=False)
class Row:
    """A candidate of which everything is known beforehand."""

    time: float
    least_time: float
    peak: int
    fits: bool
    can_fit: bool
    is_planned: bool
    watch: Watch = field(default_factory=Watch)

    @property
    def known(self) -> Known:
        level: Level = "plan" if self.is_planned else "bound"
        seconds = self.time if self.is_planned else self.least_time
        return Known(level, seconds, Fullest(0, self.peak, 0.0), self.fits)

    @property
    def forecast(self) -> None:
        """Stands for the plan, which is made when it is asked for."""
        self.is_planned = True


def rows() -> st.SearchStrategy[list[Row]]:
    """Candidates with bounds that hold, of which at least the first is planned."""

    def row(time: float, slack: float, peak: int, known: tuple[bool, bool, bool]) -> Row:
        fits, can_fit, is_planned = known
        return Row(time, time / (1 + slack), peak, fits, fits or can_fit, is_planned)

    times, known = st.floats(1, 1.05), st.tuples(*repeat(st.booleans(), 3))
    made = st.builds(row, times, st.floats(0, 0.05), st.integers(1, 6), known)
    return st.lists(made, min_size=1, max_size=8)


def dominates(one: Candidate, other: Candidate) -> bool:
    """Whether ``one`` is as good in time and memory, and better in one of them."""
    as_good = one.time <= other.time and one.peak <= other.peak
    return as_good and (one.time, one.peak) != (other.time, other.peak)


@given(compared=rows(), every=st.booleans(), late=st.booleans())
def test_no_row_dominates_the_plan_that_is_taken(
    compared: list[Row], every: bool, late: bool
) -> None:
    compared[0].is_planned = True
    candidates = cast("list[Candidate]", compared)
    table = completed(candidates[0], candidates, Watch(0.0 if late else None), every=every)
    fitting = [each for each in (table.taken, *table.others) if each.fits]
    assert table.taken.fits or not fitting
    if not table.taken.fits:
        return
    assert not any(dominates(each, table.taken) for each in fitting)
    fastest = min(each.time for each in fitting)
    near = [each for each in fitting if each.time * (1 - NEAR) <= fastest]
    assert table.taken.peak == min(each.peak for each in near)


@given(compared=rows())
def test_planning_only_what_may_be_better_finds_the_same(compared: list[Row]) -> None:
    """A bound that the chosen plan beats needs no plan: bounds are no higher than times."""
    compared[0].is_planned = compared[0].fits = compared[0].can_fit = True
    candidates = cast("list[Candidate]", compared)
    unplanned = [each.is_planned for each in compared]
    some = completed(candidates[0], candidates, Watch(), every=False).taken
    for each, planned in zip(compared, unplanned, strict=True):
        each.is_planned = planned
    whole = completed(candidates[0], candidates, Watch(), every=True).taken
    assert (some.time, some.peak) == (whole.time, whole.peak)


def test_without_time_the_rest_stays_unknown() -> None:
    first, other = Row(1.0, 1.0, 2, True, True, True), Row(0.9, 0.9, 1, True, True, False)
    candidates = cast("list[Candidate]", [first, other])
    table = completed(candidates[0], candidates, Watch(0.0), every=True)
    assert (table.taken, table.unknown) == (candidates[0], [candidates[1]])
