"""The training loop: data, schedule, gradients, optimizer, log; each arrow is one call.

Every rank walks it in step. Rank 0 prints.
"""

from collections.abc import Callable

import torch

from megatron.config.run_config import RunConfig
from megatron.data.microbatch import MicrobatchLoader
from megatron.optimizer.lr_schedule import learning_rate
from megatron.runtime.batch import DeviceMicrobatch, to_device
from megatron.runtime.observer import Observer
from megatron.training.metrics.flops import FLOPS_CONVENTION, iteration_flops
from megatron.training.metrics.log_line import evaluation_lines
from megatron.training.metrics.meter import Meter
from megatron.training.metrics.peak_tflops import Peak, peak_of_rank
from megatron.training.open_data import Data
from megatron.training.profiling.observation import Observation
from megatron.training.profiling.torch_trace import profiler
from megatron.training.rendezvous import UserError
from megatron.training.setup import TrainState
from megatron.training.step import Finished, Iteration, TrainStep, make_train_step


def train(config: RunConfig, state: TrainState, data: Data) -> None:
    """Train to the end of ``config``.

    Args:
        config: the run.
        state: this rank.
        data: what ``open_data`` returned.

    Raises:
        FloatingPointError: the loss or the gradient is infinite or NaN; names the iteration and
            the rank that saw it first.
        UserError: the data cannot be read.
    """
    say = print if state.groups.world.rank == 0 else _silent
    state.groups.world.barrier()  # a measured peak holds for all ranks at work
    peak = peak_of_rank(state.groups.device, config.train.dtype, config.log.peak_tflops)
    _introduce(config, state, peak, say)
    meter = Meter(config, state, peak, say)
    update = make_train_step(config, state)
    last = min(config.train.exit_interval or config.train.train_iters, config.train.train_iters)
    observation = Observation(config, state, last - 1, say)
    with profiler(config.log, state.groups.world.rank) as step_profiler:
        for iteration in range(last):
            if observation.times(iteration):
                meter.report(update.settle())
            with meter.paused():
                observer = observation.begin(iteration)
            finished = train_step(config, state, update, data.train, iteration, observer)
            meter.ended(iteration)
            meter.report(finished)
            with meter.paused():
                observation.finished(iteration)
            if data.valid is not None and _is_due(iteration, config.train.eval_interval):
                meter.report(update.settle())
                with meter.paused():
                    loss = evaluate(config, state, data.valid)
                say(evaluation_lines(iteration + 1, loss), flush=True)
            with meter.paused():  # it may write its trace
                step_profiler.step()
    meter.report(update.settle())
    if last == config.train.exit_interval:
        say(f"exiting at iteration {last} (--exit-interval)", flush=True)
    meter.report_memory(last)
    meter.report_post_validation()
    state.pipeline.close()


def train_step(
    config: RunConfig,
    state: TrainState,
    update: TrainStep,
    loader: MicrobatchLoader,
    iteration: int,
    observer: Observer | None = None,
) -> Finished | None:
    """Run one iteration and return the one that is final with it, if any (see ``TrainStep.train``).

    Args:
        config: the run.
        state: this rank.
        update: runs the schedule and steps.
        loader: the training data.
        iteration: counted from 0.
        observer: is told of passes and communication.

    Raises:
        FloatingPointError: as ``train``.
        UserError: as ``train``.
    """
    lr = learning_rate(config.optimizer, loader.consumed_samples)
    batch = _next_batch(loader, state.groups.device)
    return update.train(Iteration(iteration, batch, lr, loader.consumed_samples), observer)


def evaluate(config: RunConfig, state: TrainState, loader: MicrobatchLoader) -> float:
    """Return the mean loss over the next ``eval_iters`` global batches of ``loader``."""
    total = torch.zeros((), dtype=torch.float64, device=state.groups.device)
    for _ in range(config.train.eval_iters):
        batch = _next_batch(loader, state.groups.device)
        total += state.pipeline.evaluate(batch)
    state.groups.pipeline.all_reduce(total)
    return float(total) / config.train.eval_iters


def _next_batch(loader: MicrobatchLoader, device: torch.device) -> list[DeviceMicrobatch]:
    """Read the next batch: what is wrong with the data is the user's to mend."""
    try:
        batch = loader.next_batch()
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    return to_device(batch, device)


def _introduce(config: RunConfig, state: TrainState, peak: Peak, say: Callable[..., None]) -> None:
    """Print what runs, on what, and how it is counted."""
    parallel, train_config = config.parallel, config.train
    counts = state.groups.pipeline.all_gather_object(
        sum(p.parameter.numel() for p in state.parameters if p.counts_in_norm)
    )
    for note in config.notes:
        say(note)
    say(
        f"pipeline of {parallel.pipeline_size} on {state.groups.device.type} "
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


def _is_due(iteration: int, interval: int | None) -> bool:
    return interval is not None and (iteration + 1) % interval == 0


def _silent(*_: object, **__: object) -> None:
    """Print nothing: rank 0 speaks."""
