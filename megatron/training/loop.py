"""The training loop: data, schedule, gradients, optimizer, log; each arrow is one call.

Every rank walks it in step. Rank 0 prints.
"""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
from typing import NoReturn

import torch

from megatron.data.microbatch import MicrobatchLoader
from megatron.optimizer.grad_norm import local_sum_of_squares
from megatron.optimizer.lr_schedule import learning_rate
from megatron.runtime.batch import DeviceMicrobatch, to_device
from megatron.runtime.timeline import Recorder
from megatron.simulator.timeline_file import save_timeline
from megatron.training.config import RunConfig
from megatron.training.data import Data
from megatron.training.flops import FLOPS_CONVENTION, iteration_flops
from megatron.training.log_line import (
    IterationValues,
    evaluation_lines,
    iteration_line,
    memory_line,
)
from megatron.training.memory import peak_memory
from megatron.training.peak import Peak, peak_of_rank
from megatron.training.profile import profiler
from megatron.training.setup import Trainer


def train(config: RunConfig, trainer: Trainer, data: Data) -> None:
    """Train to the end of ``config``.

    Args:
        config: the run.
        trainer: this rank.
        data: what ``open_data`` returned.

    Raises:
        FloatingPointError: the loss or the gradient is infinite or NaN; names the iteration and
            the rank that saw it first.
    """
    say = print if trainer.groups.rank == 0 else _silent
    trainer.groups.barrier()  # a measured peak holds for all ranks at work
    peak = peak_of_rank(trainer.groups.device, config.train.dtype, config.log.peak_tflops)
    _introduce(config, trainer, peak, say)
    meter = _Meter(config, trainer, peak, say)
    with profiler(config.log, trainer.groups.rank) as step_profiler:
        for iteration in range(config.train.train_iters):
            recorder = _recorder(config, trainer, iteration)
            loss, grad_norm = train_step(config, trainer, data.train, iteration, recorder)
            meter.finished(iteration + 1, loss, grad_norm, data.train.consumed_samples)
            if recorder is not None:
                with meter.paused():
                    _save_timeline(config, trainer, recorder)
            if data.valid is not None and _is_due(iteration, config.train.eval_interval):
                with meter.paused():
                    loss = evaluate(config, trainer, data.valid)
                say(evaluation_lines(iteration + 1, loss), flush=True)
            with meter.paused():  # it may write its trace
                step_profiler.step()
            if _is_due(iteration, config.train.exit_interval):
                say(f"exiting at iteration {iteration + 1} (--exit-interval)", flush=True)
                break
    meter.report_memory(iteration + 1)
    trainer.pipeline.close()


def train_step(
    config: RunConfig,
    trainer: Trainer,
    loader: MicrobatchLoader,
    iteration: int,
    recorder: Recorder | None = None,
) -> tuple[float, float]:
    """Run one iteration and return its (loss, gradient norm before clipping).

    Args:
        config: the run.
        trainer: this rank.
        loader: the training data.
        iteration: counted from 0.
        recorder: records the schedule's timeline.

    Raises:
        FloatingPointError: as ``train``.
    """
    lr = learning_rate(config.optimizer, loader.consumed_samples)
    batch = to_device(loader.next_batch(), trainer.groups.device)
    loss_part = trainer.pipeline.train(batch, iteration, recorder)
    # Loss and gradient norm of the whole model in one reduction, and one wait for the device.
    totals = torch.stack([loss_part.double(), local_sum_of_squares(trainer.parameters)])
    trainer.groups.all_reduce(totals)
    loss, sum_of_squares = totals.tolist()
    if not (math.isfinite(loss) and math.isfinite(sum_of_squares)):
        _report_not_finite(trainer, batch, iteration, loss)
    grad_norm = math.sqrt(sum_of_squares)
    trainer.optimizer.step(lr, grad_norm)
    trainer.gradients.zero()
    return loss, grad_norm


def evaluate(config: RunConfig, trainer: Trainer, loader: MicrobatchLoader) -> float:
    """Return the mean loss over the next ``eval_iters`` global batches of ``loader``."""
    total = torch.zeros((), dtype=torch.float64, device=trainer.groups.device)
    for _ in range(config.train.eval_iters):
        batch = to_device(loader.next_batch(), trainer.groups.device)
        total += trainer.pipeline.evaluate(batch)
    trainer.groups.all_reduce(total)
    return float(total) / config.train.eval_iters


def _report_not_finite(
    trainer: Trainer, batch: list[DeviceMicrobatch], iteration: int, loss: float
) -> NoReturn:
    """Find where infinity or NaN came from, and end the run.

    Raises:
        FloatingPointError: always.
    """
    where = trainer.pipeline.first_not_finite(batch)
    if where is not None:
        microbatch, rank, what = where
        found = f"rank {rank} saw it first, in {what}, microbatch {microbatch}"
    else:
        own = bool(torch.isfinite(local_sum_of_squares(trainer.parameters)))
        finite = trainer.groups.all_gather_object(own)
        ranks = [rank for rank, is_finite in enumerate(finite) if not is_finite]
        found = f"the forward is finite, the gradient is not, on rank {', '.join(map(str, ranks))}"
    raise FloatingPointError(
        f"iteration {iteration + 1}: lm loss is {loss}: {found}; lower --lr or look at the data "
        "of this iteration"
    )


def _introduce(config: RunConfig, trainer: Trainer, peak: Peak, say: Callable[..., None]) -> None:
    """Print what runs, on what, and how it is counted."""
    parallel, train_config = config.parallel, config.train
    counts = trainer.groups.all_gather_object(
        sum(p.parameter.numel() for p in trainer.parameters if p.counts_in_norm)
    )
    for note in config.notes:
        say(note)
    say(
        f"pipeline of {parallel.pipeline_size} on {trainer.groups.device.type} "
        f"({parallel.backend}), schedule {parallel.pipeline_schedule}, vocabulary "
        f"{parallel.vocab_parallel}, {train_config.num_microbatches} microbatches, "
        f"{str(train_config.dtype).removeprefix('torch.')}"
    )
    say(
        f"vocabulary {config.model.vocab_size}, padded to {parallel.padded_vocab_size} in "
        f"{parallel.vocab_shards} shard{'s' if parallel.vocab_shards > 1 else ''}"
    )
    say(f"parameters: {sum(counts):,}; by rank: {', '.join(f'{c:,}' for c in counts)}")
    say(f"{FLOPS_CONVENTION}; {iteration_flops(config.model, train_config.global_batch_size):.3E} "
        "per iteration")  # fmt: skip
    say(f"peak of a rank: {peak.tflops:.3f} TFLOP/s ({peak.source})", flush=True)


class _Meter:
    """Times iterations and prints Megatron's line every ``log_interval`` of them."""

    def __init__(
        self, config: RunConfig, trainer: Trainer, peak: Peak, say: Callable[..., None]
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._peak = peak
        self._say = say
        self._flops = iteration_flops(config.model, config.train.global_batch_size)
        self._losses: list[float] = []
        self._memory_reported = False
        self._begin = time.perf_counter()

    def paused(self) -> AbstractContextManager[None]:
        """Return a context whose time does not count."""
        return _Paused(self)

    def skip(self, seconds: float) -> None:
        """Do not count ``seconds``."""
        self._begin += seconds

    def finished(self, iteration: int, loss: float, grad_norm: float, consumed: int) -> None:
        """Note a finished iteration, counted from 1; print when the interval is full."""
        self._losses.append(loss)
        if iteration % self._config.log.log_interval:
            return
        now, count = time.perf_counter(), len(self._losses)
        seconds = (now - self._begin) / count
        tflops = self._flops / seconds / self._trainer.groups.size / 1e12
        values = IterationValues(
            time=datetime.now().astimezone(),
            iteration=iteration,
            train_iters=self._config.train.train_iters,
            consumed_samples=consumed,
            seconds_per_iteration=seconds,
            tflops_per_rank=tflops,
            mfu=tflops / self._peak.tflops,
            learning_rate=learning_rate(self._config.optimizer, consumed),
            global_batch_size=self._config.train.global_batch_size,
            lm_loss=sum(self._losses) / count,
            grad_norm=grad_norm,
        )
        self._say(iteration_line(values), flush=True)
        self.report_memory(iteration)
        self._losses = []
        self._begin = time.perf_counter()

    def report_memory(self, iteration: int) -> None:
        """Print the peak memory of every rank, once in a run."""
        if self._memory_reported:
            return
        self._memory_reported = True
        peaks = self._trainer.groups.all_gather_object(peak_memory(self._trainer.groups.device))
        for rank, memory in enumerate(peaks):
            self._say(memory_line(rank, iteration, memory), flush=True)


class _Paused(AbstractContextManager[None]):
    def __init__(self, meter: _Meter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._meter.skip(time.perf_counter() - self._start)


def _recorder(config: RunConfig, trainer: Trainer, iteration: int) -> Recorder | None:
    """Return a recorder for the last iteration if its timeline is wanted, else ``None``."""
    last = min(config.train.exit_interval or config.train.train_iters, config.train.train_iters)
    if config.log.record_timeline is None or iteration + 1 != last:
        return None
    recorder = Recorder(trainer.groups.rank, trainer.groups.device)
    trainer.groups.barrier()
    recorder.begin()
    return recorder


def _save_timeline(config: RunConfig, trainer: Trainer, recorder: Recorder) -> None:
    timeline = trainer.pipeline.timeline(recorder)
    if trainer.groups.rank == 0 and config.log.record_timeline is not None:
        save_timeline(timeline, config.log.record_timeline)


def _is_due(iteration: int, interval: int | None) -> bool:
    return interval is not None and (iteration + 1) % interval == 0


def _silent(*_: object, **__: object) -> None:
    """Print nothing: rank 0 speaks."""
