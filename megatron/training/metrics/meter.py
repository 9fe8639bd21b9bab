"""Times iterations and prints Megatron's line every few of them.

An iteration ends when its last pass and its step have been issued; what is known of it, loss and
norm, may be known later only. Its time counts where it was spent.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

from megatron.config.run_config import RunConfig
from megatron.optimizer.lr_schedule import learning_rate
from megatron.training.metrics.flops import iteration_flops
from megatron.training.metrics.log_line import IterationValues, iteration_line, memory_line
from megatron.training.metrics.peak_memory import peak_memory
from megatron.training.metrics.peak_tflops import Peak
from megatron.training.setup import TrainState
from megatron.training.step import Finished


class Meter:
    """Every rank has one and calls it in step.

    Args:
        config: the run.
        state: this rank.
        peak: of the device, for the MFU.
        say: prints, on rank 0.
    """

    def __init__(
        self, config: RunConfig, state: TrainState, peak: Peak, say: Callable[..., None]
    ) -> None:
        self._config = config
        self._trainer = state
        self._peak = peak
        self._say = say
        self._flops = iteration_flops(config.model, config.train.global_batch_size)
        self._losses: list[float] = []
        self._steps = self._steps_redone = 0
        self._memory_reported = False
        self._paused = 0.0
        self._ends: dict[int, float] = {}  # of iterations that are not reported yet
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
        """Note what is known of an iteration that has ended; print when the interval is full."""
        if finished is None:
            return
        end = self._ends.pop(finished.number)
        self._losses.append(finished.loss)
        self._steps += 1
        self._steps_redone += finished.step_redone
        if (finished.number + 1) % self._config.log.log_interval:
            return
        seconds = (end - self._begin) / len(self._losses)
        self._say(iteration_line(self._values(finished, seconds)), flush=True)
        with self.paused():
            self.report_memory(finished.number + 1)
        self._losses = []
        self._begin = end

    def report_memory(self, iteration: int) -> None:
        """Print the peak memory of every rank, once in a run."""
        if self._memory_reported:
            return
        self._memory_reported = True
        groups = self._trainer.groups
        peaks = groups.world.all_gather_object(peak_memory(groups.device))
        for rank, memory in enumerate(peaks):
            self._say(memory_line(rank, iteration, memory), flush=True)

    def report_post_validation(self) -> None:
        """Print how many steps were wrong guesses: each has cost the forwards of a warm-up."""
        if self._config.optimizer.post_validation:
            self._say(
                f"optimizer post-validation: {self._steps_redone} of {self._steps} steps redone",
                flush=True,
            )

    def _values(self, finished: Finished, seconds: float) -> IterationValues:
        tflops = self._flops / seconds / self._trainer.groups.world.size / 1e12
        return IterationValues(
            time=datetime.now().astimezone(),
            iteration=finished.number + 1,
            train_iters=self._config.train.train_iters,
            consumed_samples=finished.consumed_samples,
            seconds_per_iteration=seconds,
            tflops_per_rank=tflops,
            mfu=tflops / self._peak.tflops,
            learning_rate=learning_rate(self._config.optimizer, finished.consumed_samples),
            global_batch_size=self._config.train.global_batch_size,
            lm_loss=sum(self._losses) / len(self._losses),
            grad_norm=finished.grad_norm,
        )

    def _clock(self) -> float:
        """Seconds of training so far, without pauses."""
        return time.perf_counter() - self._paused
