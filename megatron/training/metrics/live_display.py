"""The live display: a few lines about the run that stay below the printed lines on a terminal.

The ``Live`` of the package rich draws the display. The terminal stays usable at every moment, even
if the process is killed: the cursor is visible and below the display, and the display changes no
mode of the terminal. The display is redrawn only over its own lines, and only after an event in
which all ranks have taken part. After a rank has failed, there is no such event, so nothing is
drawn over its error. When a run ends by an error, the display stays, and the error stands below it.
"""

import io
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import fmean
from typing import Any, Final, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment, Segments
from rich.table import Column, Table
from rich.text import Text

from megatron.training.metrics.loss_plot import History, plot
from megatron.training.metrics.records import Evaluation, Interval, Record, Sink, Step

REDRAW_SECONDS: Final = 0.25
"""Least time between two drawings; a drawing takes about a millisecond."""

PLOT_ROWS: Final = 3
LEAST_ROWS: Final = 16
"""Fewest rows of a terminal on which the display is shown."""

RECENT: Final = 0.9
"""Weight of the old mean when the time of an iteration joins the running mean."""

RANKS_BY_NAME: Final = 8
"""Most ranks whose idle shares are shown one by one; for more ranks, only the range is shown."""


@dataclass
class Shown:
    """The values that the display shows.

    ``evaluations`` has the last evaluation of every set, and ``seconds`` is a running mean of the
    time of an iteration.
    """

    step: Step | None = None
    interval: Interval | None = None
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    losses: History = field(default_factory=History)
    seconds: float | None = None

    def take(self, record: Record) -> None:
        """Take the values of a record."""
        if isinstance(record, Step):
            self.step = record
            if math.isfinite(record.lm_loss):
                self.losses.add(record.lm_loss)
            before = record.seconds if self.seconds is None else self.seconds
            self.seconds = RECENT * before + (1 - RECENT) * record.seconds
        elif isinstance(record, Interval):
            self.interval = record
        elif isinstance(record, Evaluation):
            self.evaluations[record.dataset] = record

    def table(self, width: int) -> Table | None:
        """Return the display for ``width`` columns; ``None`` before the first iteration."""
        if self.step is None or self.seconds is None:
            return None
        table = Table.grid(Column(no_wrap=True, overflow="crop", width=width))
        table.add_row(Text("─" * width, "dim"))
        table.add_row(_progress(self.step, self.seconds))
        for row in plot(self.losses.means, max(20, width), PLOT_ROWS):
            table.add_row(Text(row, "cyan"))
        table.add_row(Text(self._loss(self.step), "bold"))
        table.add_row(self._rates(self.step))
        if self.interval is not None and self.interval.idle:
            table.add_row(_idle(self.interval.idle))
        return table

    def _loss(self, step: Step) -> str:
        told = [f"loss {step.lm_loss:.4f}", f"grad norm {step.grad_norm:.3f}"]
        told += [
            f"{name} {evaluation.lm_loss:.4f} (PPL {evaluation.perplexity:.4g})"
            for name, evaluation in self.evaluations.items()
        ]
        return ", ".join(told)

    def _rates(self, step: Step) -> str:
        told = [f"learning rate {step.learning_rate:.3e}", f"{step.consumed_samples:,} samples"]
        if self.interval is not None:
            told[:0] = [
                f"{self.interval.tokens_per_second:,.0f} tokens/s",
                f"{self.interval.tflops_per_rank:.3g} TFLOP/s a rank",
                f"MFU {self.interval.mfu:.1%}",
            ]
        return ", ".join(told)


def _progress(step: Step, seconds: float) -> Table:
    left = timedelta(seconds=round(seconds * max(0, step.train_iters - step.iteration)))
    row = Table.grid(Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), padding=(0, 2))
    row.expand = True
    row.add_row(
        Text(f"iteration {step.iteration}/{step.train_iters}", "bold"),
        ProgressBar(step.train_iters, step.iteration),
        f"{step.iteration / step.train_iters:.0%}, {seconds:.3g} s each, {left} left",
    )
    return row


def _idle(shares: tuple[float, ...]) -> str:
    mean = f"idle {fmean(shares):.1%}"
    if len(shares) > RANKS_BY_NAME:
        return f"{mean} of the time, the ranks from {min(shares):.1%} to {max(shares):.1%}"
    return f"{mean} of the time, by rank {' '.join(f'{share:.1%}' for share in shares)}"


class Terminal(Console):
    """A console that prints text as it is, and leaves the cursor visible."""

    def __init__(self, file: TextIO, **options: Any) -> None:
        super().__init__(
            file=file, soft_wrap=True, markup=False, emoji=False, highlight=False, **options
        )

    def show_cursor(self, show: bool = True) -> bool:
        """Do nothing: a process that is killed could not show a hidden cursor again."""
        return False

    @property
    def can_show(self) -> bool:
        """Whether the cursor can be moved, and rows and characters suffice for the display."""
        return (
            self.is_terminal
            and not self.is_dumb_terminal
            and self.encoding.startswith("utf")
            and self.height >= LEAST_ROWS
        )


class LiveDisplay(Sink):
    """Draws the display, and prints lines above it."""

    name = "the live display"
    wants_ranks = True

    def __init__(self, terminal: Terminal, clock: Callable[[], float] = time.monotonic) -> None:
        self._terminal = terminal
        self._clock = clock
        self._shown = Shown()
        self._drawn_at = -REDRAW_SECONDS
        self._live = Live(
            console=terminal,
            auto_refresh=False,
            transient=True,
            # Other prints of this process, warnings for example, go above the display, too.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )

    def say(self, text: str) -> None:
        """Print lines above the display."""
        self._end_lines()
        self._terminal.print(Segments([Segment(f"{text}\n")]))  # as it is

    def write(self, record: Record) -> None:
        """Draw the display anew; for iterations only every ``REDRAW_SECONDS``."""
        self._shown.take(record)
        now = self._clock()
        if isinstance(record, Step) and now - self._drawn_at < REDRAW_SECONDS:
            return
        self._drawn_at = now
        table = self._shown.table(self._terminal.width - 1)  # a full line would move the cursor
        if table is not None:
            self._end_lines()
            self._live.update(Group(table, ""))  # the cursor stands in the last, empty line
            self._live.start()
            self._live.refresh()

    def close(self, failed: bool) -> None:
        """Remove the display from the terminal; if the run has failed, leave it there."""
        self._end_lines()
        if failed:  # another rank may have printed its error below the display
            self._terminal.file = io.StringIO()
        self._live.stop()

    def _end_lines(self) -> None:
        """Print lines that other code has begun and not ended; ``Live`` holds them back."""
        if self._live.is_started:
            sys.stdout.flush()
            sys.stderr.flush()
