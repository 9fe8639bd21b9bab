"""Curves for TensorBoard: ``--tensorboard-dir``, written by PyTorch's writer or by tensorboardX.

A bar chart is a histogram of the numbers of its bars: number i occurs as often as bar i is high.

If only tensorboardX is installed, names have underscores in place of spaces, as it requires.
"""

import importlib
import json
from pathlib import Path
from typing import Any

from megatron.run.records import is_installed
from megatron.training.metrics.curves import Bars, Curves
from megatron.training.metrics.json_lines import plain
from megatron.training.metrics.records import Generated, GeneratedText, Record, Sink, Started


class TensorBoard(Sink):
    """Draws curves.

    Up to ``queue_size`` points may wait to be written.
    """

    def __init__(self, folder: Path, queue_size: int, curves: Curves) -> None:
        self.name = f"--tensorboard-dir {folder}"
        self.wants_ranks = curves.wants_ranks
        self._folder = folder
        self._queue_size = queue_size
        self._curves = curves
        self._writer: Any = None
        self._space = " " if is_installed("tensorboard") else "_"

    def write(self, record: Record) -> None:
        """Add the record's points, over iterations and, as in Megatron, over samples."""
        if isinstance(record, Started):
            self._writer = _writer(self._folder, self._queue_size)
            config = json.dumps(plain(record.config), indent=2)
            self._writer.add_text("configuration", f"```json\n{config}\n```", record.iteration)
        if isinstance(record, Generated) and self._writer is not None:
            for number, own in enumerate(record.texts, 1):
                tag = f"text {number}".replace(" ", self._space)
                self._writer.add_text(tag, _as_markdown(own), record.iteration)
        for curve, value, over_samples in self._curves.points(record):
            self._add(curve, value, record.iteration)
            if over_samples:
                self._add(f"{curve} vs samples", value, record.consumed_samples)
        for bars in self._curves.bars(record):
            self._add_bars(bars, record.iteration)

    def close(self, failed: bool) -> None:
        """Write the points that wait to be written."""
        if self._writer is not None:
            self._writer.close()

    def _add(self, curve: str, value: float, place: int) -> None:
        if self._writer is not None:  # else its folder could not be opened: already told
            self._writer.add_scalar(curve.replace(" ", self._space), value, place)

    def _add_bars(self, bars: Bars, iteration: int) -> None:
        if self._writer is None:
            return
        numbered = list(enumerate(bars.heights))
        self._writer.add_histogram_raw(
            bars.chart,
            min=-0.5,
            max=len(numbered) - 0.5,
            num=sum(bars.heights),
            sum=sum(bar * height for bar, height in numbered),
            sum_squares=sum(bar**2 * height for bar, height in numbered),
            bucket_limits=[bar + 0.5 for bar, _ in numbered],
            bucket_counts=list(bars.heights),
            global_step=iteration,
        )


def _as_markdown(own: GeneratedText) -> str:
    """Return a prompt and its text as a block of code, so that no character has a meaning."""
    parts = [part for part in (own.prompt, own.text) if part]
    return "\n\n---\n\n".join("\n".join(f"    {line}" for line in p.splitlines()) for p in parts)


def _writer(folder: Path, queue_size: int) -> Any:
    module = "torch.utils.tensorboard" if is_installed("tensorboard") else "tensorboardX"
    return importlib.import_module(module).SummaryWriter(str(folder), max_queue=queue_size)
