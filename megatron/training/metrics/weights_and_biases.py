"""Curves for Weights & Biases: ``--wandb-project``, under the names that they have in TensorBoard.

As in Megatron-LM, all curves are drawn over the iterations. ``samples vs steps`` is the curve of
the consumed samples.
"""

import importlib
from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any, Final

from megatron.run.records import RecordSettings
from megatron.training.metrics.curves import Curves
from megatron.training.metrics.json_lines import plain
from megatron.training.metrics.records import Generated, Record, Sink, Started, Step
from megatron.training.rendezvous import UserError

MOST_BINS: Final = 512
"""Bins of a histogram that ``wandb`` accepts."""


class WeightsAndBiases(Sink):
    """Sends curves with the package ``wandb``."""

    def __init__(self, config: RecordSettings, curves: Curves) -> None:
        self.name = f"--wandb-project {config.wandb_project}"
        self.wants_ranks = curves.wants_ranks
        self._config = config
        self._curves = curves
        self._wandb = importlib.import_module("wandb")
        self._run: Any = None

    def write(self, record: Record) -> None:
        """Send the record's points.

        Raises:
            UserError: the run cannot be begun, for example because nobody is logged in.
            OSError: the points cannot be sent.
        """
        if isinstance(record, Started):
            self._begin(record)
        points: dict[str, Any] = {curve: value for curve, value, _ in self._curves.points(record)}
        for chart, heights in self._curves.bars(record):
            points[chart] = self._wandb.Histogram(np_histogram=_few_bins(heights))
        if isinstance(record, Generated):
            rows = [[own.prompt, own.text] for own in record.texts]
            points["texts"] = self._wandb.Table(columns=["prompt", "text"], data=rows)
        if points and isinstance(record, Step):
            points["samples vs steps"] = record.consumed_samples
        if points and self._run is not None:
            try:
                self._run.log(points, step=record.iteration)
            except self._wandb.Error as error:
                raise OSError(str(error)) from error

    def close(self, failed: bool) -> None:
        """End the run at Weights & Biases."""
        if self._run is not None:
            self._run.finish(exit_code=int(failed))

    def _begin(self, record: Started) -> None:
        config, folder = self._config, self._config.wandb_save_dir
        try:
            self._run = self._wandb.init(
                project=config.wandb_project,
                name=config.wandb_exp_name,
                entity=config.wandb_entity,
                dir=_made(folder),
                config=plain(record.config),
            )
        except self._wandb.Error as error:
            raise UserError(
                f"{self.name}: {error}; log in with wandb login, set WANDB_MODE=offline, or leave "
                "it out"
            ) from error


def _few_bins(heights: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return heights of at most ``MOST_BINS`` bins and their edges; a bin adds up its bars."""
    bars = ceil(len(heights) / MOST_BINS)
    edges = [*range(0, len(heights), bars), len(heights)]
    return [sum(heights[begin:end]) for begin, end in pairwise(edges)], edges


def _made(folder: Path | None) -> str | None:
    """Make a folder; ``wandb`` would use a temporary folder in place of a missing one."""
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)
