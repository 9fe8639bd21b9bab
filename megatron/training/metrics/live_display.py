"""The live display: a few lines about the run that stay below the printed ones on a terminal.

The terminal stays an ordinary one at every moment: the cursor is visible and below the display,
and nothing is switched on that a killed process could not switch off. Drawing anew moves up over
the own lines only, after an event that all ranks have taken part in. So a rank that fails may print
what it has to say: no other one draws after it. When a run ends by an error, the display stays as
it is, and the error stands below it.
"""

import io
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import fmean
from typing import Final, TextIO

from rich.console import Console
from rich.text import Text

from megatron.training.metrics.loss_plot import History, plot
from megatron.training.metrics.records import Evaluation, Interval, Record, Step

REDRAW_SECONDS: Final = 0.25
"""Time between two drawings, of which one takes about a millisecond."""

PLOT_ROWS: Final = 3
LEAST_ROWS: Final = 16
"""Of a terminal on which the display is worth its lines."""

RECENT: Final = 0.9
"""Share of the mean time of an iteration that the next one leaves as it is."""

RANKS_BY_NAME: Final = 8
"""Ranks whose idle shares are told one by one; of more ranks, only the spread is."""


@dataclass
class Shown:
    """What the display tells.

    Attributes:
        step: the last iteration.
        interval: the last record of an interval.
        evaluations: the last evaluation of every set.
        losses: of all iterations.
        seconds: recent mean time of an iteration.
    """

    step: Step | None = None
    interval: Interval | None = None
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    losses: History = field(default_factory=History)
    seconds: float | None = None

    def take(self, record: Record) -> None:
        """Take what a record tells."""
        if isinstance(record, Step):
            self.step = record
            self.losses.add(record.lm_loss)
            before = record.seconds if self.seconds is None else self.seconds
            self.seconds = RECENT * before + (1 - RECENT) * record.seconds
        elif isinstance(record, Interval):
            self.interval = record
        elif isinstance(record, Evaluation):
            self.evaluations[record.dataset] = record

    def lines(self, width: int) -> list[Text]:
        """The display, for a terminal of ``width`` columns; empty before the first iteration."""
        if self.step is None or self.seconds is None:
            return []
        lines = [Text("─" * width, "dim"), self._progress(self.step, self.seconds, width)]
        lines += self._loss(self.step, width)
        lines.append(self._rates(self.step))
        if self.interval is not None and self.interval.idle:
            lines.append(_idle(self.interval.idle))
        return lines

    def _progress(self, step: Step, seconds: float, width: int) -> Text:
        left = timedelta(seconds=round(seconds * (step.train_iters - step.iteration)))
        done = step.iteration / step.train_iters
        head = f"iteration {step.iteration}/{step.train_iters}"
        tail = f"{done:.0%}, {seconds:.3g} s each, {left} left"
        bar = max(0, width - len(head) - len(tail) - 4)
        filled = int(bar * done)
        return Text.assemble(
            (head, "bold"), "  ", ("━" * filled, "green"), ("━" * (bar - filled), "dim"), "  ", tail
        )

    def _loss(self, step: Step, width: int) -> list[Text]:
        told = [f"loss {step.lm_loss:.4f}", f"grad norm {step.grad_norm:.3f}"]
        told += [
            f"{name} {evaluation.lm_loss:.4f} (PPL {evaluation.perplexity:.4g})"
            for name, evaluation in self.evaluations.items()
        ]
        curve = plot(self.losses.means, max(20, width), PLOT_ROWS)
        return [*(Text(row, "cyan") for row in curve), Text(", ".join(told), "bold")]

    def _rates(self, step: Step) -> Text:
        told = [f"learning rate {step.learning_rate:.3e}", f"{step.consumed_samples:,} samples"]
        if self.interval is not None:
            told[:0] = [
                f"{self.interval.tokens_per_second:,.0f} tokens/s",
                f"{self.interval.tflops_per_rank:.3g} TFLOP/s a rank",
                f"MFU {self.interval.mfu:.1%}",
            ]
        return Text(", ".join(told))


def _idle(shares: tuple[float, ...]) -> Text:
    mean = f"idle {fmean(shares):.1%}"
    if len(shares) > RANKS_BY_NAME:
        return Text(f"{mean} of the time, the ranks from {min(shares):.1%} to {max(shares):.1%}")
    return Text(f"{mean} of the time, by rank {' '.join(f'{share:.1%}' for share in shares)}")


class LiveDisplay:
    """Draws the display, and prints lines above it.

    Args:
        terminal: to draw on.
        console: tells its size and its colours; by default found out.
        clock: returns the time in seconds.
    """

    name = "the live display"
    wants_ranks = True

    def __init__(
        self,
        terminal: TextIO,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._terminal = terminal
        self._console = console or Console(file=terminal)
        self._clock = clock
        self._shown = Shown()
        self._height = 0  # lines that are drawn right above the cursor
        self._in_line = False  # whether the cursor is behind text of others
        self._drawn_at = -REDRAW_SECONDS
        self._replaced: list[tuple[str, TextIO]] = []

    def say(self, text: str) -> None:
        """Print lines above the display."""
        self._show(f"{text}\n", self._frame() if self._height else "")

    def beside(self, text: str) -> None:
        """Print what others write in place of the display, which comes back with the next event."""
        self._show(text, "")

    def write(self, record: Record) -> None:
        """Draw the display anew, though not too often for iterations alone."""
        self._shown.take(record)
        now = self._clock()
        if isinstance(record, Step) and now - self._drawn_at < REDRAW_SECONDS:
            return
        self._drawn_at = now
        frame = self._frame()
        if frame and not self._replaced:
            self._take_streams()
        self._show("", frame)

    def close(self, failed: bool) -> None:
        """Remove the display from the terminal, or leave it alone if an error is to follow."""
        for name, stream in self._replaced:
            setattr(sys, name, stream)
        self._replaced = []
        if not failed:
            self._show("", "")
        self._height = 0

    def _show(self, text: str, frame: str) -> None:
        """Replace the display by ``text`` and ``frame`` below it, in one write."""
        erase = f"\x1b[{self._height}F\x1b[J" if self._height else ""
        if text:
            self._in_line = not text.endswith("\n")
        if frame and self._in_line:
            text, self._in_line = f"{text}\n", False
        self._height = frame.count("\n")
        self._terminal.write(f"{erase}{text}{frame}")
        self._terminal.flush()

    def _frame(self) -> str:
        """Return the lines of the display as the terminal wants them, each within its width."""
        width = self._console.width - 1  # a full line would leave the cursor behind its end
        with self._console.capture() as captured:
            for line in self._shown.lines(width):
                self._console.print(line, width=width, no_wrap=True, overflow="crop")
        return captured.get()

    def _take_streams(self) -> None:
        """Let what this process prints otherwise, warnings for example, not fall into the display.

        Only the streams that lead to a terminal; the last thing that is drawn must be known.
        """
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream.isatty():
                self._replaced.append((name, stream))
                setattr(sys, name, _Beside(self, stream))


class _Beside(io.TextIOBase):
    """Stands in for a stream that leads to the terminal of a display."""

    def __init__(self, display: LiveDisplay, stream: TextIO) -> None:
        self._display = display
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a plain attribute in the base class
        """Encoding of the terminal."""
        return self._stream.encoding

    def write(self, text: str) -> int:
        """Print beside the display."""
        self._display.beside(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: everything is written at once."""

    def isatty(self) -> bool:
        """Yes."""
        return True

    def fileno(self) -> int:
        """The terminal's."""
        return self._stream.fileno()


def can_show(terminal: TextIO, console: Console | None = None) -> bool:
    """Whether a display can be shown: on a terminal that moves its cursor and has the characters.

    Args:
        terminal: where lines are printed.
        console: as in ``LiveDisplay``.
    """
    console = console or Console(file=terminal)
    return (
        console.is_terminal
        and not console.is_dumb_terminal
        and console.encoding.startswith("utf")
        and console.height >= LEAST_ROWS
    )
