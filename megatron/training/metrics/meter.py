"""Times iterations and prints Megatron's line every few of them.

An iteration ends when its last pass and its optimizer's step have been issued. Its loss and its
gradient norm may be known only later; its time still counts for the interval in which it was spent.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from megatron.optimizer.config import OptimizerConfig
from megatron.optimizer.lr_schedule import learning_rate
from megatron.parallel.groups import Groups
from megatron.training.metrics.log_line import IterationValues, iteration_line, memory_line
from megatron.training.metrics.peak_memory import peak_memory
from megatron.training.step import Finished


@dataclass(frozen=True)
class Metered:
    """The values that are the same in every line of a run.

    Attributes:
        log_interval: iterations per printed line.
        train_iters: iterations of the whole job.
        consumed_samples: of iterations that an earlier run has trained.
        flops: model FLOPs of a sample, over all ranks.
        peak_tflops: peak of one rank in TFLOP/s, for the MFU.
    """

    log_interval: int
    train_iters: int
    consumed_samples: int
    flops: int
    peak_tflops: float


class Meter:
    """Times the iterations of a run; every rank has a meter, and all ranks call it in step.

    Args:
        metered: the values that are the same in every line.
        optimizer: learning rate by samples, and whether steps are post-validated.
        groups: this rank's view of the job.
        say: prints, on rank 0.
    """

    def __init__(
        self,
        metered: Metered,
        optimizer: OptimizerConfig,
        groups: Groups,
        say: Callable[..., None],
    ) -> None:
        self._metered = metered
        self._optimizer = optimizer
        self._groups = groups
        self._say = say
        self._consumed = self._printed = metered.consumed_samples
        self._losses: list[float] = []
        self._unprinted: tuple[Finished, float] | None = None  # the last one, and when it ended
        self._skipped = self._nans = 0  # iterations since the last line
        self._steps = self._steps_redone = 0
        self._memory_reported = False
        self._paused = 0.0
        self._ends: dict[int, float] = {}  # ends of the iterations that are not reported yet
        self._begin = self._clock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time spent in this context."""
        start = time.perf_counter()
        yield
        self._paused += time.perf_counter() - start

    def ended(self, number: int) -> None:
        """Note that iteration ``number``, counted from 0, has ended."""
        self._ends[number] = self._clock()

    def report(self, finished: Finished | None) -> None:
        """Note loss and norm of an iteration that has ended; print when the interval is full."""
        if finished is None:
            return
        end = self._ends.pop(finished.number)
        if finished.is_skipped:
            self._skipped += 1
            self._nans += not math.isfinite(finished.loss)
        else:
            self._losses.append(finished.loss)
        self._steps += 1
        self._steps_redone += finished.step_redone
        self._batch = finished.consumed_samples - self._consumed
        self._consumed = finished.consumed_samples
        self._unprinted = finished, end
        if (finished.number + 1) % self._metered.log_interval == 0:
            self.report_rest()

    def report_rest(self) -> None:
        """Print the iterations since the last line, if there are any, as the end of a run does."""
        if self._unprinted is None:
            return
        finished, end = self._unprinted
        seconds = (end - self._begin) / (len(self._losses) + self._skipped)
        self._say(iteration_line(self._values(finished, seconds)), flush=True)
        with self.paused():
            self.report_memory(finished.number + 1)
        self._losses, self._skipped, self._nans, self._unprinted = [], 0, 0, None
        self._printed = finished.consumed_samples
        self._begin = end

    def report_memory(self, iteration: int) -> None:
        """Print the peak memory of every rank, once in a run."""
        if self._memory_reported:
            return
        self._memory_reported = True
        peaks = self._groups.world.all_gather_object(peak_memory(self._groups.device))
        for rank, memory in enumerate(peaks):
            self._say(memory_line(rank, iteration, memory), flush=True)

    def report_post_validation(self) -> None:
        """Print how many steps were redone: each has cost the forwards of a warm-up."""
        if self._optimizer.post_validation:
            self._say(
                f"optimizer post-validation: {self._steps_redone} of {self._steps} steps redone",
                flush=True,
            )

    def _values(self, finished: Finished, seconds: float) -> IterationValues:
        metered = self._metered
        samples = (finished.consumed_samples - self._printed) / len(self._losses)
        tflops = metered.flops * samples / seconds / self._groups.world.size / 1e12
        return IterationValues(
            time=datetime.now().astimezone(),
            iteration=finished.number + 1,
            train_iters=metered.train_iters,
            consumed_samples=finished.consumed_samples,
            seconds_per_iteration=seconds,
            tflops_per_rank=tflops,
            mfu=tflops / metered.peak_tflops,
            learning_rate=learning_rate(self._optimizer, finished.consumed_samples),
            global_batch_size=self._batch,
            lm_loss=sum(self._losses) / len(self._losses) if self._losses else math.nan,
            grad_norm=finished.grad_norm,
            num_zeros=finished.num_zeros,
            params_norm=finished.params_norm,
            skipped=self._skipped,
            nans=self._nans,
        )

    def _clock(self) -> float:
        """Return the current time in seconds, less all pauses."""
        return time.perf_counter() - self._paused
