"""The display stays below the printed lines, and leaves a terminal as it found it."""

import contextlib
import io
import math
import sys
from dataclasses import replace

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from training.metrics.made_records import ended, evaluation, interval, step
from training.metrics.screen import Screen

from megatron.run.records import RecordSettings
from megatron.training.metrics.live_display import REDRAW_SECONDS, LiveDisplay, Shown, Terminal
from megatron.training.metrics.log import Lines, Log, open_log
from megatron.training.metrics.records import RankFigures, Record

WIDTH = 70


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def terminal(screen: Screen, height: int = 40, kind: str = "xterm-256color") -> Terminal:
    return Terminal(
        screen, width=WIDTH, height=height, force_terminal=True, _environ={"TERM": kind}
    )


def display(screen: Screen, clock: Clock) -> LiveDisplay:
    return LiveDisplay(terminal(screen), clock)


def told(records: list[Record]) -> list[str]:
    """The lines that are printed without a display."""
    said: list[str] = []
    for record in records:
        Lines(said.append).write(record)
    return said


EVENTS = st.lists(
    st.one_of(
        st.integers(1, 100).map(step),
        st.integers(1, 100).map(interval),
        st.integers(1, 100).map(evaluation),
        st.integers(1, 100).map(ended),
        st.sampled_from(["saved", "two\nlines", "", "x" * 200]),
    ),
    max_size=30,
)


@settings(max_examples=examples(50))
@given(EVENTS, st.lists(st.sampled_from([0.0, 0.1, 10.0]), min_size=1))
def test_at_the_end_the_terminal_has_the_printed_lines_and_nothing_else(
    events: list[Record | str], pauses: list[float]
) -> None:
    screen, clock = Screen(), Clock()
    shown = display(screen, clock)
    log = Log(shown.say, [shown, Lines(shown.say)])
    plain: list[str] = []
    for number, event in enumerate(events):
        clock.now += pauses[number % len(pauses)]
        if isinstance(event, str):
            log.say(event)
            plain.append(event)
        else:
            log.write(event)
            plain += told([event])
        begin = "\n".join([*plain, ""])
        assert screen.shown.startswith(begin), "the lines stand above, as they were printed"
    log.close()
    assert screen.shown == "\n".join([*plain, ""])


def drawn(*records: Record) -> str:
    screen = Screen()
    shown = display(screen, Clock())
    for record in records:
        shown.write(record)
    return screen.shown


def test_what_is_shown() -> None:
    ranks = (RankFigures(0, 1, None, 0.25), RankFigures(1, 1, None, 0.05))
    text = drawn(step(1), interval(1, ranks=ranks), evaluation(1))
    for part in (
        "iteration 1/100",
        "1%, 2 s each, 0:03:18 left",
        "loss 9.9000",
        "validation 2.0000 (PPL 7.389)",
        "40 tokens/s, 0.25 TFLOP/s a rank, MFU 50.0%",
        "idle 15.0% of the time, by rank 25.0% 5.0%",
    ):
        assert part in text
    assert all(len(line) < WIDTH for line in text.split("\n"))


def test_the_shares_of_many_ranks_are_told_by_their_spread() -> None:
    ranks = tuple(RankFigures(n, 1, None, n / 100) for n in range(11))
    assert "idle 5.0% of the time, the ranks from 0.0% to 10.0%" in drawn(
        step(1), interval(1, ranks=ranks)
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_told_and_leaves_the_curve_as_it_is(loss: float) -> None:
    with_it = drawn(step(1), step(2, lm_loss=loss), interval(3))
    plain = drawn(step(1), interval(3))
    curve = slice(2, 5)
    assert with_it.split("\n")[curve] == plain.split("\n")[curve]
    assert f"loss {loss}" in drawn(step(2, lm_loss=loss), interval(3))


def test_nothing_is_drawn_before_the_first_iteration() -> None:
    assert drawn(evaluation(0), ended(0)) == ""
    assert Shown().table(WIDTH) is None


def test_iterations_alone_are_not_drawn_too_often() -> None:
    screen, clock = Screen(), Clock()
    shown = display(screen, clock)
    for number in range(1, 101):
        clock.now += REDRAW_SECONDS / 10
        shown.write(step(number))
    assert screen.writes == 10


def test_an_error_is_the_last_thing_on_the_terminal() -> None:
    screen = Screen()
    shown = display(screen, Clock())
    log = Log(shown.say, [shown])
    log.write(step(1))
    with pytest.raises(FloatingPointError), log:
        raise FloatingPointError
    before = screen.shown
    screen.write("error: the loss is infinite\n")
    assert screen.shown == before + "error: the loss is infinite\n"
    assert "iteration 1/100" in before


def test_what_another_rank_prints_when_this_one_ends_stays() -> None:
    screen = Screen()
    shown = display(screen, Clock())
    shown.write(step(1))
    before = screen.shown
    screen.feed("[rank 1] failed:\nTraceback\nBoom\n")
    shown.close(failed=True)
    assert screen.shown == before + "[rank 1] failed:\nTraceback\nBoom\n"


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize("failed", [False, True])
def test_other_prints_of_the_process_stay_and_its_streams_come_back(
    name: str, failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, name, screen)
    shown = display(screen, Clock())
    shown.write(interval(1))
    shown.write(replace(step(1), lm_loss=3.0))
    shown.write(interval(1))
    print("a warning", file=getattr(sys, name))
    print("without an end", end="", file=getattr(sys, name))
    shown.write(interval(2))
    shown.say("a line")
    shown.close(failed)
    assert getattr(sys, name) is screen
    text = screen.shown
    assert text.startswith("a warning\nwithout an end\na line\n")
    assert ("iteration 1/100" in text) == failed


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("text", ["half a line", "[rank0] a tag[/], :smile: and\n" + "long" * 40])
def test_what_stands_in_a_begun_line_is_not_lost_at_the_end(
    text: str, failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    shown = display(screen, Clock())
    shown.write(step(1))
    print(text, end="", file=sys.stderr)
    shown.close(failed)
    assert screen.shown.startswith(f"{text}\n")


def test_a_stream_that_leads_elsewhere_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = io.StringIO()
    monkeypatch.setattr(sys, "stderr", elsewhere)
    shown = display(Screen(), Clock())
    shown.write(step(1))
    assert sys.stderr is elsewhere
    shown.close(failed=False)


@pytest.mark.parametrize(
    ("height", "kind", "can"), [(40, "xterm", True), (10, "xterm", False), (40, "dumb", False)]
)
def test_where_it_can_be_shown(height: int, kind: str, can: bool) -> None:
    assert terminal(Screen(), height, kind).can_show == can


def test_only_a_terminal_of_rank_0_has_one_and_only_if_wanted() -> None:
    def shows(config: RecordSettings, rank: int, stream: io.StringIO) -> bool:
        with contextlib.redirect_stdout(stream):
            log = open_log(config, rank, 2, stream)
            log.write(step(1))
            log.close(failed=True)
        return bool(stream.getvalue() or getattr(stream, "writes", 0))

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TERM", "xterm")
        environment.setenv("LINES", "40")
        environment.setenv("COLUMNS", "100")
        environment.delenv("NO_COLOR", raising=False)
        assert shows(RecordSettings(), 0, Screen())
        assert not shows(RecordSettings(), 1, Screen())
        assert not shows(RecordSettings(no_live_display=True), 0, Screen())
        assert not shows(RecordSettings(), 0, io.StringIO())
