"""Times iterations, and records them one by one, and in intervals of several iterations.

An iteration ends when its last pass and its optimizer's step have been issued. Its loss and its
gradient norm may be known only later. Even then its time counts for the interval in which it ran.
"""

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any, Final, Literal

from megatron.optimizer.lr_schedule import learning_rate
from megatron.parallel.groups import Groups
from megatron.runtime.observer import Observer
from megatron.runtime.timeline import Recorder
from megatron.training.layer_figures import LayerReport, mean_of
from megatron.training.metrics.log import Log
from megatron.training.metrics.log_line import memory_line
from megatron.training.metrics.peak_memory import peak_memory
from megatron.training.metrics.rank_figures import gather_figures, pass_times
from megatron.training.metrics.records import (
    Ended,
    Interval,
    LayerFigures,
    RankFigures,
    Slowest,
    Started,
    Step,
    now,
)
from megatron.training.metrics.stragglers import Stragglers, report
from megatron.training.step import Finished

Pause = Literal["save", "evaluation", "other"]
"""Reason for which training stands still."""


WARM_UP: Final = 3
"""First iterations of a process, which load code and memory."""

RECENT: Final = 100
"""Iterations whose seconds are kept."""


class Meter:
    """Times the iterations of a run; every rank has a meter, and all ranks call it in step.

    With ``stragglers``, memory, idle time and computing time are recorded by rank; then all ranks
    give it.

    Attributes:
        recent: number, from 1, and seconds of the last ``RECENT`` iterations after the warm-up, but
            for skipped ones.
    """

    def __init__(
        self, started: Started, groups: Groups, log: Log, stragglers: Stragglers | None = None
    ) -> None:
        self._started, self._config = started, started.config
        self._seq_length = started.config.model.seq_length
        self._groups = groups
        self._log = log
        self._stragglers = stragglers
        self._consumed = started.consumed_samples
        self._batch = self._trained = 0  # samples of the last iteration, and of the interval
        self._losses: list[float] = []
        self._mtp_losses: list[tuple[float, ...]] = []
        self._layers: list[LayerReport] = []
        self._unrecorded: tuple[Finished, float] | None = None  # the last, and when it ended
        self._skipped = self._nans = 0  # iterations of the interval
        self._steps = self._steps_redone = 0
        self._memory_reported = False
        self._paused: dict[Pause, float] = {"save": 0.0, "evaluation": 0.0, "other": 0.0}
        self._ends: dict[int, float] = {}  # ends of the iterations that are not reported yet
        self._recorders: dict[int, Recorder] = {}  # of iterations whose idle time is recorded
        self._begin = self._last_end = self._clock()
        self._warm_up = WARM_UP
        self.recent: deque[tuple[int, float]] = deque(maxlen=RECENT)

    @contextmanager
    def paused(self, what: Pause = "other") -> Iterator[None]:
        """Do not count the time spent in this context for any iteration."""
        start = time.perf_counter()
        yield
        self._paused[what] += time.perf_counter() - start

    def observer(self, number: int, other: Observer | None) -> Observer | None:
        """Return the observer of iteration ``number``; the idle time comes from its record.

        An ``other`` observer that is a recorder serves both purposes, and is returned itself.
        """
        if self._stragglers is None or not self._is_recorded(number):
            return other
        if other is not None and not isinstance(other, Recorder):
            return other
        recorder = other or Recorder(self._groups.pipeline.rank, self._groups.device)
        self._recorders[number] = recorder
        return recorder

    def ended(self, number: int) -> None:
        """Note that iteration ``number``, counted from 0, has ended."""
        self._ends[number] = self._clock()

    def report(self, finished: Finished | None) -> None:
        """Record an iteration whose loss and norm are known, and an interval that it completes."""
        if finished is None:
            return
        end = self._ends.pop(finished.number)
        if finished.is_skipped:
            self._skipped += 1
            self._nans += not math.isfinite(finished.loss)
        else:
            self._losses.append(finished.loss)
            self._mtp_losses.append(finished.depth_losses)
            self._layers.append(finished.layers)
        self._steps += 1
        self._steps_redone += finished.step_redone
        self._batch = finished.consumed_samples - self._consumed
        self._consumed = finished.consumed_samples
        if not finished.is_skipped:
            self._trained += self._batch
            self._log.write(self._step(finished, end - self._last_end))
            if self._warm_up:
                self._warm_up -= 1
            else:
                self.recent.append((finished.number + 1, end - self._last_end))
        self._last_end = end
        self._unrecorded = finished, end
        if self._is_recorded(finished.number):
            self.report_rest()

    def report_rest(self) -> None:
        """Record the iterations since the last interval, if any, as an interval of their own."""
        if self._unrecorded is None:
            return
        finished, end = self._unrecorded
        seconds = end - self._begin
        figures, slowest = self._figures(finished.number)
        self._log.write(self._interval(finished, seconds, figures, slowest))
        if self._config.guard.log_straggler:
            for line in report(finished.number + 1, figures, slowest):
                self._log.say(line)
        with self.paused():
            self.report_memory(finished.number + 1)
        self._losses, self._skipped, self._nans, self._unrecorded = [], 0, 0, None
        self._trained, self._mtp_losses, self._layers = 0, [], []
        self._begin = end

    def report_memory(self, iteration: int) -> None:
        """Print the peak memory of every rank, once in a run."""
        if self._memory_reported:
            return
        self._memory_reported = True
        peaks = self._groups.world.all_gather_object(peak_memory(self._groups.device))
        for rank, memory in enumerate(peaks):
            self._log.say(memory_line(rank, iteration, memory))

    def report_post_validation(self) -> None:
        """Print how many steps were redone; each redone step has cost the forwards of a warm-up."""
        if self._config.optimizer.post_validation:
            self._log.say(
                f"optimizer post-validation: {self._steps_redone} of {self._steps} steps redone"
            )

    def report_end(self, iteration: int, consumed_samples: int) -> None:
        """Record the end of the run."""
        self._log.write(
            Ended(
                time=now(),
                iteration=iteration,
                consumed_samples=consumed_samples,
                consumed_tokens=consumed_samples * self._seq_length,
                seconds_in_saves=self._paused["save"],
                seconds_in_evaluations=self._paused["evaluation"],
            )
        )

    def _is_recorded(self, number: int) -> bool:
        """Whether an interval ends with iteration ``number``."""
        return (number + 1) % self._config.log.log_interval == 0

    def _figures(self, number: int) -> tuple[tuple[RankFigures, ...], Slowest | None]:
        """Return the figures of all ranks if they are recorded, and on rank 0 the slowest rank."""
        if self._stragglers is None:
            return (), None
        recorder = self._recorders.pop(number, None)
        passes = None if recorder is None else pass_times(recorder)
        figures = gather_figures(self._groups, peak_memory(self._groups.device), passes)
        if self._groups.world.rank != 0:  # rank 0 writes the record
            return figures, None
        return self._stragglers.compared(figures)

    def _step(self, finished: Finished, seconds: float) -> Step:
        return Step(
            iteration=finished.number + 1,
            train_iters=self._started.train_iters,
            consumed_samples=finished.consumed_samples,
            seconds=seconds,
            learning_rate=self._rate_after(finished),
            global_batch_size=self._batch,
            lm_loss=finished.loss,
            grad_norm=finished.grad_norm,
            params_norm=finished.params_norm,
            num_zeros=finished.num_zeros,
            loss_scale=finished.loss_scale,
            mtp_losses=finished.depth_losses,
            **self._of_layers([finished.layers]),
        )

    def _rate_after(self, finished: Finished) -> float:
        """Return the learning rate of the next step."""
        counted = finished.consumed_samples - finished.samples_without_step
        return learning_rate(self._config.optimizer, counted)

    def _interval(
        self,
        finished: Finished,
        seconds: float,
        ranks: tuple[RankFigures, ...],
        slowest: Slowest | None,
    ) -> Interval:
        started, samples_per_second = self._started, self._trained / seconds
        of_sample = started.flops // self._config.train.global_batch_size
        tflops = of_sample * samples_per_second / self._groups.world.size / 1e12
        return Interval(
            time=now(),
            iteration=finished.number + 1,
            train_iters=started.train_iters,
            consumed_samples=finished.consumed_samples,
            consumed_tokens=finished.consumed_samples * self._seq_length,
            seconds_per_iteration=seconds / (len(self._losses) + self._skipped),
            tflops_per_rank=tflops,
            mfu=tflops / started.peak_tflops,
            tokens_per_second=samples_per_second * self._seq_length,
            learning_rate=self._rate_after(finished),
            global_batch_size=self._batch,
            lm_loss=sum(self._losses) / len(self._losses) if self._losses else math.nan,
            grad_norm=finished.grad_norm,
            params_norm=finished.params_norm,
            num_zeros=finished.num_zeros,
            skipped=self._skipped,
            nans=self._nans,
            seconds_in_saves=self._paused["save"],
            seconds_in_evaluations=self._paused["evaluation"],
            slowest=slowest,
            ranks=ranks,
            loss_scale=finished.loss_scale,
            mtp_losses=tuple(map(fmean, zip(*self._mtp_losses, strict=True))),
            **self._of_layers(self._layers),
        )

    def _of_layers(self, reports: Sequence[LayerReport]) -> dict[str, Any]:
        """Return the fields of a record about layers, over some iterations."""
        together = mean_of(reports)
        found: dict[str, Any] = {"layer_losses": together.mean_losses}
        if busiest := together.largest:
            found["expert_imbalance"] = busiest.ratio
            found["busiest_layer"], found["busiest_expert"] = busiest.layer, busiest.expert
        if self._config.log.moe_per_layer_logging:
            found["layers"] = tuple(_layers(together))
        return found

    def _clock(self) -> float:
        """Return the current time in seconds, less all pauses."""
        return time.perf_counter() - sum(self._paused.values())


def _layers(report: LayerReport) -> Iterator[LayerFigures]:
    """Yield the figures of every layer that has some."""
    imbalances = {own.layer: own for own in report.imbalances}
    for layer in sorted({layer for layer, _ in report.losses} | imbalances.keys()):
        losses = {name: loss for (of, name), loss in report.losses.items() if of == layer}
        own = imbalances.get(layer)
        balance = () if own is None else (own.ratio, own.expert, own.loads)
        yield LayerFigures(layer, losses, *balance)
