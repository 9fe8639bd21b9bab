"""Whole jobs on a terminal: what stands on it at the end, however the job ends."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
from harness.job_guard import guarded
from launch.test_training_job import (
    ITERATION_LINE,
    PATIENCE,
    ROOT,
    rank_process,
    training_flags,
)
from training.metrics.screen import Screen

ROWS, COLUMNS = 40, 120
DISPLAY = re.compile(r"^iteration \d+/\d+  ━", re.MULTILINE)
WHOLE = re.compile(r"^iteration \d+/\d+  ━.*^idle [\d.]+% of the time[^\n]*\n\Z", re.M | re.S)
"""A screen that ends with a whole display."""
SILENCE = 1.0
"""Seconds without output after which a process that is stopped has no output on its way."""
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d")


class Terminal:
    """One end of a terminal, and what it shows; the other end is a job's.

    The screen knows no other control than those of the display, and fails at any that would have to
    be switched off.

    Attributes:
        screen: what whole lines of output have made of it.
        displayed: whether a display was ever on it.
    """

    def __init__(self, descriptor: int) -> None:
        self.screen = Screen()
        self.displayed = False
        self._descriptor = descriptor
        self._raw = b""

    def read(self, seconds: float) -> bool:
        """Take the output of at most so many seconds; return whether there was any."""
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return False
        *lines, self._raw = (self._raw + os.read(self._descriptor, 1 << 16)).split(b"\n")
        for line in lines:
            self.screen.feed(f"{line.decode()}\n")
            self.displayed = self.displayed or DISPLAY.search(self.screen.shown) is not None
        return True

    @property
    def shows_a_run(self) -> bool:
        """Whether five iterations were printed, and a whole display stands below them."""
        shown = self.screen.shown
        return len(ITERATION_LINE.findall(shown)) >= 5 and WHOLE.search(shown) is not None

    def close(self) -> None:
        """Take what has no end of a line."""
        self.screen.feed(self._raw.decode())


@dataclass
class Ended:
    """A job that has ended on a terminal.

    Attributes:
        code: its exit code.
        displayed: whether a display was ever on the terminal.
        shown: what the terminal shows at the end.
        settings: of the terminal, before and after.
    """

    code: int
    displayed: bool
    shown: str
    settings: tuple[Any, Any]


def on_terminal(
    flags: str, ranks: int = 1, act: Callable[[subprocess.Popen[bytes]], None] | None = None
) -> Ended:
    """Run a job on a terminal of its own.

    Args:
        flags: of the job.
        ranks: one, or two under torchrun.
        act: is done once, when the terminal shows a whole display below five iterations. A job of
            one rank is halted meanwhile, so that a signal finds nothing half written.
    """
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    before = termios.tcgetattr(inner)
    launcher = () if ranks == 1 else (*TORCHRUN, "--rdzv-endpoint", "localhost:0")
    script = training_flags(None, f"--pipeline-model-parallel-size {ranks} {flags}")
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    environment |= {"PYTHONIOENCODING": "utf-8", "NO_COLOR": ""}
    with ctrl_c_reaches_new_processes():
        job = subprocess.Popen(
            [sys.executable, *launcher, *script],
            env={**os.environ, **environment},
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
        )
    terminal = Terminal(outer)
    end = time.monotonic() + PATIENCE
    with closing_all(outer, inner), guarded(job):
        while terminal.read(0.2) or job.poll() is None:
            assert time.monotonic() < end, terminal.screen.shown
            if act is not None and terminal.shows_a_run:
                with halted(job, terminal) if ranks == 1 else nullcontext():
                    if terminal.shows_a_run:
                        act(job)
                        act = None
        terminal.close()
        shown, settings = terminal.screen.shown, (before, termios.tcgetattr(inner))
        assert act is None, shown
        return Ended(job.returncode, terminal.displayed, shown, settings)


@contextmanager
def ctrl_c_reaches_new_processes() -> Iterator[None]:
    """Start processes within the context that Ctrl-C ends, as those of a shell on a terminal.

    A shell without a terminal lets what it starts in the background ignore Ctrl-C. The tests and
    their jobs would inherit that. A signal that has a handler is inherited with its default.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def halted(job: subprocess.Popen[bytes], terminal: Terminal) -> Iterator[None]:
    """Halt a job within the context, with all its output on the terminal."""
    job.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, job.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    while terminal.read(SILENCE):
        pass
    yield
    job.send_signal(signal.SIGCONT)


@contextmanager
def closing_all(*descriptors: int) -> Iterator[None]:
    """Close some file descriptors at the end of the context."""
    try:
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def test_at_the_end_there_are_lines_only_and_an_error_is_the_last_of_them() -> None:
    """A loss that grows without a bound; the display stands above the error."""
    ended = on_terminal(
        "--train-iters 500 --optimizer sgd --lr 100 --lr-warmup-iters 400 --clip-grad 0 "
        "--eval-iters 0"
    )
    assert ended.code == 1, ended.shown
    assert re.search(r"\n.*idle [\d.]+% of the time.*\nerror: iteration .*\n$", ended.shown)
    assert len(DISPLAY.findall(ended.shown)) == 1
    assert ended.settings[0] == ended.settings[1]


@pytest.mark.full
def test_a_display_that_is_gone_leaves_the_lines() -> None:
    ended = on_terminal("--train-iters 60 --lr 1e-2")
    assert ended.code == 0, ended.shown
    assert ended.displayed
    assert not DISPLAY.search(ended.shown)
    found = [int(line["iteration"]) for line in ITERATION_LINE.finditer(ended.shown)]
    assert found == list(range(1, 61))
    assert ended.settings[0] == ended.settings[1]


@pytest.mark.full
def test_nobody_must_have_a_display() -> None:
    ended = on_terminal("--train-iters 8 --lr 1e-2 --no-live-display")
    assert ended.code == 0, ended.shown
    assert len(ITERATION_LINE.findall(ended.shown)) == 8
    assert not ended.displayed


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_the_terminal_as_it_was(how: signal.Signals) -> None:
    ended = on_terminal("--train-iters 9999 --lr 1e-2", act=lambda job: job.send_signal(how))
    assert ended.code == (130 if how == signal.SIGINT else -how)
    assert "\npipeline of 1 on cpu" in ended.shown
    lost = re.findall(r"\ninterrupted after iteration \d+: (.*);", ended.shown)
    assert len(lost) == (how == signal.SIGINT)
    assert all(re.fullmatch(r"\d+ iterations? of this run (is|are) lost", own) for own in lost)
    assert re.search(r"\nidle [\d.]+% of the time.*\n$", ended.shown), "the cursor is below it"
    assert ended.settings[0] == ended.settings[1]


@pytest.mark.full
def test_a_lost_rank_is_told_below_the_display() -> None:
    """Rank 0 has the display, and torchrun tells of rank 1."""

    def kill(job: subprocess.Popen[bytes]) -> None:
        os.kill(rank_process(job.pid, 1), signal.SIGKILL)

    ended = on_terminal("--train-iters 9999 --lr 1e-2", ranks=2, act=kill)
    assert ended.code == 1, ended.shown
    below = ended.shown[list(DISPLAY.finditer(ended.shown))[-1].end() :]
    assert "(SIGKILL)" in below
    assert re.search(r"=+\n$", below)
