"""A watch ends searches in time, and shows a reader how far they are without flooding him."""

import re
from io import StringIO

import pytest

from megatron.schedules.catalogue import SCHEDULES
from megatron.schedules.costs import Costs
from megatron.schedules.held import in_flight
from megatron.schedules.make_plan import find_plan, plan_for
from megatron.schedules.request import Request
from megatron.schedules.search.watch import Watch
from megatron.schedules.timing import earliest

UNEVEN = Costs({"F": 18, "B": 20, "W": 14, "S": 5, "T": 5, "IF": 1, "IB": 1})


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def watched(stream: StringIO, seconds: float | None = None) -> tuple[Watch, Clock]:
    clock = Clock()
    return Watch(seconds, stream, clock), clock


def test_a_quick_search_shows_nothing() -> None:
    stream = StringIO()
    watch, clock = watched(stream)
    watch.begin("zb-v")
    clock.now = 1.9
    watch.show(0.5)
    watch.note("zb-v: 1.0")
    watch.close()
    assert stream.getvalue() == ""


def test_a_file_gets_a_line_now_and_then() -> None:
    stream = StringIO()
    watch, clock = watched(stream)
    watch.begin("zb-v")
    for second in range(60):
        clock.now = float(second)
        watch.show(second / 100, "bubble 1.0%")
    lines = stream.getvalue().splitlines()
    assert lines[0] == ("zb-v: 2% of its trials made, about 98 s left, best so far: bubble 1.0%")
    assert [line.split()[1] for line in lines] == ["2%", "22%", "42%"]


def test_a_terminal_has_one_line_that_is_rewritten_below_those_that_stay() -> None:
    stream = Terminal()
    watch, clock = watched(stream)
    watch.begin("zb-v")
    watch.note("1f1b: 1.2")
    for clock.now, share in ((4.0, 0.4), (5.0, 0.5)):
        watch.show(share)
    watch.note("zb-v: 1.0")
    watch.close()
    clear = "\r\x1b[K"
    assert stream.getvalue() == (
        "1f1b: 1.2\nzb-v: 40% of its trials made, about 6 s left"
        f"{clear}zb-v: 50% of its trials made, about 5 s left"
        f"{clear}zb-v: 1.0\n"
    )


def test_of_several_plans_it_says_which_one_is_made_and_how_long_all_take() -> None:
    """After 26 s one plan of five and a quarter of the second are made."""
    stream = StringIO()
    watch, clock = watched(stream)
    watch.expect(3)
    watch.expect(2)
    for plan, search, at in ((1, 1, 5.0), (1, 2, 10.0), (2, 1, 26.0)):
        if search == 1:
            watch.next_plan()
        watch.begin(f"s{plan}", search, 2)
        clock.now = at
    watch.show(0.5)
    said = stream.getvalue().splitlines()[-1]
    assert said == (
        "s2 (2 of at most 5 plans), search 1 of 2: 50% of its trials made, about 16 s left, "
        "159 s for all plans"
    )
    watch.planned("s2", "time 7")
    assert stream.getvalue().endswith("s2 (2 of at most 5 plans): time 7\n")


def test_long_times_are_told_in_minutes_and_never_beyond_those_of_the_watch() -> None:
    for seconds, left, every in ((None, "20 min", "80 min"), (600.0, "10 min", "10 min")):
        stream = StringIO()
        watch, clock = watched(stream, seconds)
        watch.expect(4)
        watch.next_plan()
        watch.begin("zb-v")
        clock.now = 12.0
        watch.show(0.01)
        assert f"about {left} left, {every} for all plans" in stream.getvalue()


def test_the_time_left_is_at_most_that_of_the_watch() -> None:
    stream = StringIO()
    watch, clock = watched(stream, 5.0)
    watch.begin("zb-v")
    clock.now = 3.0
    watch.show(0.1)
    assert "about 2 s left" in stream.getvalue()
    clock.now = 30.0  # a trial that began in time ends late
    watch.show(0.2)
    assert "about 0 s left" in stream.getvalue()
    assert "about -" not in stream.getvalue()


def test_a_search_that_was_cut_is_told_and_one_that_was_not_is_not() -> None:
    for ended_at, told in ((4.9, False), (5.0, True)):
        stream = StringIO()
        watch, clock = watched(stream, 5.0)
        clock.now = ended_at
        assert watch.is_over is watch.was_cut is told
        watch.close()
        assert ("the search ends after 5 s: " in stream.getvalue()) is told
    clock.now = 6.0
    assert not watch.again(5.0).is_over


@pytest.mark.parametrize("schedule", ["zb-v", "zb-2p", "v-half", "interleaved", "zb-auto", "auto"])
def test_without_time_there_is_a_plan_all_the_same(schedule: str) -> None:
    limit = 7.0 if TAKES_LIMIT[schedule] else None
    request = Request(schedule, "vocab-2", 3, 9, UNEVEN, memory_limit=limit)
    watch = Watch(0.0)
    quick = find_plan(request, watch).plan
    assert watch.was_cut
    if limit is not None:
        assert max(in_flight(quick)) <= limit
    if schedule != "auto":  # it may take another schedule, whose search would have done worse
        assert earliest(quick, UNEVEN).end >= earliest(plan_for(request), UNEVEN).end


TAKES_LIMIT = {
    "zb-v": False, "zb-2p": False, "v-half": False, "interleaved": False,
    "zb-auto": True, "auto": True,
}  # fmt: skip


def test_a_search_shows_how_far_it_is() -> None:
    """The clock goes on by a second whenever it is read, so the search seems long."""

    class Running(Clock):
        def __call__(self) -> float:
            self.now += 1.0
            return self.now

    stream = StringIO()
    request = Request("auto", "vocab-2", 3, 9, UNEVEN)
    find_plan(request, Watch(None, stream, Running()))
    said = stream.getvalue()
    assert "of its trials made, about" in said
    assert "best so far: bubble" in said
    of_all = rf"of at most {len(SCHEDULES)} plans\)"
    made = re.findall(rf"^\S+ \((\d+) {of_all}: time [\d.]+ in the unit of the costs, ", said, re.M)
    assert made == [str(number + 1) for number in range(len(made))]
    assert len(made) > 1
    assert re.search(rf"^zb-v \(\d+ {of_all}, search 2 of 2: ", said, re.M)
