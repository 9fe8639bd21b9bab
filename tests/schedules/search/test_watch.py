"""A watch ends searches in time, and shows a reader how far they are without flooding him."""

from io import StringIO

import pytest

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
    assert lines[0] == "zb-v: 2% searched, at most 98 s left, bubble 1.0%"
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
        "1f1b: 1.2\nzb-v: 40% searched, at most 6 s left"
        f"{clear}zb-v: 50% searched, at most 5 s left"
        f"{clear}zb-v: 1.0\n"
    )


def test_the_time_left_is_at_most_that_of_the_watch() -> None:
    stream = StringIO()
    watch, clock = watched(stream, 5.0)
    watch.begin("zb-v")
    clock.now = 3.0
    watch.show(0.1)
    assert "at most 2 s left" in stream.getvalue()


def test_a_search_that_was_cut_is_told_and_one_that_was_not_is_not() -> None:
    for ended_at, told in ((4.9, False), (5.0, True)):
        stream = StringIO()
        watch, clock = watched(stream, 5.0)
        clock.now = ended_at
        assert watch.is_over is watch.was_cut is told
        watch.close()
        assert ("the 5 s of the search are over" in stream.getvalue()) is told
    clock.now = 6.0
    assert not watch.again().is_over


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
    assert "searched, at most" in said
    assert "bubble" in said
    assert "zb-v: time" in said
