"""The evaluations of a run: of the validation set between iterations, of all sets at the end."""

import time
from dataclasses import dataclass

from megatron.data.microbatch import MicrobatchLoader
from megatron.run.train import TrainSettings
from megatron.training.iteration import evaluate
from megatron.training.metrics.log import Log
from megatron.training.metrics.meter import Meter
from megatron.training.metrics.records import Evaluation, now, perplexity
from megatron.training.open_data import Data, evaluations_of_validation
from megatron.training.setup import TrainState


@dataclass(frozen=True)
class Evaluations:
    """Evaluates, and records the losses; all ranks call every method alike.

    Each evaluation has its own samples; the number of finished iterations decides which.

    In ``meter``, the time of an evaluation counts for no iteration. With ``reads_whole_sets`` every
    evaluation reads a validation set from its beginning to its end.
    """

    config: TrainSettings
    state: TrainState
    data: Data
    meter: Meter
    log: Log
    reads_whole_sets: bool = False

    def is_due(self, iteration: int) -> bool:
        """Whether there is an evaluation after ``iteration``, counted from 0."""
        interval = self.config.eval_interval
        return (
            interval is not None and bool(self.data.validation) and (iteration + 1) % interval == 0
        )

    def between(self, iteration: int) -> None:
        """Evaluate after ``iteration``, counted from 0; its step must be final."""
        assert self.config.eval_interval is not None
        self._validate(iteration + 1, iteration // self.config.eval_interval, at_end=False)

    def at_end(self, iterations: int) -> None:
        """Evaluate all sets at the end, after ``iterations`` iterations."""
        if "validation" in self.config.final_sets:
            interval = self.config.eval_interval
            self._validate(iterations, iterations // interval if interval else 0, at_end=True)
        if "test" in self.config.final_sets and self.data.test is not None:
            batches = self.config.eval_iters
            self._evaluate("test", self.data.test, iterations, batches, at_end=True)

    def _validate(self, iterations: int, before: int, at_end: bool) -> None:
        """Evaluate the validation sets, with the samples after ``before`` earlier evaluations."""
        sets, config = self.data.validation, self.config
        assert sets, "without data nothing is evaluated"
        # A resumed run with smaller batches has more evaluations than data: it reads data again.
        number = before % evaluations_of_validation(config)
        first = number * config.eval_iters * config.global_batch_size
        for name, loader in sets.items():
            loader.consumed_samples = 0 if self.reads_whole_sets else first
            batches = loader.whole_batches if self.reads_whole_sets else config.eval_iters
            self._evaluate(name, loader, iterations, batches, at_end=at_end)

    def _evaluate(
        self,
        dataset: str,
        loader: MicrobatchLoader,
        iterations: int,
        batches: int,
        *,
        at_end: bool,
    ) -> None:
        started, first = time.perf_counter(), loader.consumed_samples
        with self.meter.paused("evaluation"):
            loss = evaluate(self.state, loader, batches)
        self.log.write(
            Evaluation(
                time=now(),
                iteration=iterations,
                consumed_samples=self.data.train.consumed_samples,
                dataset=dataset,
                at_end=at_end,
                lm_loss=loss,
                perplexity=perplexity(loss),
                seconds=time.perf_counter() - started,
                first_batch=1 + first // self.config.global_batch_size,
                batches=batches,
            )
        )
