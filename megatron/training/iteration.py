"""One training iteration, and one evaluation: read the data, run the schedule, report the loss."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.data.microbatch import MicrobatchLoader
from megatron.optimizer.global_state import GlobalState
from megatron.optimizer.lr_schedule import rates
from megatron.optimizer.settings import OptimizerSettings
from megatron.parallel.groups import Groups
from megatron.runtime.batch import DeviceMicrobatch, to_device, token_counts
from megatron.runtime.feed import Feed
from megatron.runtime.observer import Observer
from megatron.training.rendezvous import UserError
from megatron.training.setup import TrainState
from megatron.training.step import Finished, Iteration, TrainStep


def run_iteration(
    step: TrainStep,
    optimizer: OptimizerSettings,
    loader: MicrobatchLoader,
    groups: Groups,
    iteration: int,
    observer: Observer | None = None,
    feed: Feed | None = None,
    *,
    by_microbatch: bool = False,
) -> Finished | None:
    """Run one iteration, and return the iteration that this makes final (``TrainStep.train``).

    ``iteration`` is counted from 0. ``feed`` brings the next batch to the device while this
    iteration runs. Without a feed, each batch is brought when it is needed. With ``by_microbatch``,
    every microbatch has the same weight (``to_device``).

    Raises:
        FloatingPointError: as in ``TrainStep.train``.
        UserError: the data cannot be read.
    """
    first, scale = loader.consumed_samples, step.loss_scale
    if feed is None:
        batch = _next_batch(loader, groups, scale, by_microbatch=by_microbatch)
    else:
        batch = _fed(loader, feed, groups, scale, by_microbatch=by_microbatch)
    return step.train(
        Iteration(
            iteration,
            batch,
            lambda without_step: rates(optimizer, first - without_step),
            loader.consumed_samples,
            scale,
        ),
        observer,
    )


def evaluate(state: TrainState, loader: MicrobatchLoader, eval_iters: int) -> float:
    """Return the mean loss over the tokens of the next ``eval_iters`` global batches.

    As in Megatron-LM, all tokens that count in these batches have the same weight.
    """
    groups, total, counted = state.groups, 0.0, 0.0
    for _ in range(eval_iters):
        batch = _next_batch(loader, groups)
        tokens = token_counts(batch) if groups.vocabulary.rank == 0 else (0.0, 0.0)
        own = GlobalState(float(state.pipeline.evaluate(batch)), 0.0, *tokens)
        sums = torch.tensor(own.values, dtype=torch.float64, device=groups.device)
        groups.world.all_reduce(sums)
        full = GlobalState.of(sums.tolist())
        total += full.loss * full.valid_tokens
        counted += full.valid_tokens
    return total / counted if counted else 0.0


def _next_batch(
    loader: MicrobatchLoader,
    groups: Groups,
    loss_scale: float = 1.0,
    *,
    by_microbatch: bool = False,
) -> list[DeviceMicrobatch]:
    """Read the next batch."""
    with _faults_of_data():
        batch = loader.next_batch()
    return to_device(
        batch,
        groups.device,
        replicas=groups.data.size,
        loss_scale=loss_scale,
        by_microbatch=by_microbatch,
    )


def _fed(
    loader: MicrobatchLoader,
    feed: Feed,
    groups: Groups,
    loss_scale: float,
    *,
    by_microbatch: bool,
) -> list[DeviceMicrobatch]:
    """Take the next batch, and let the loader read the batch after it."""
    with _faults_of_data():
        staged = loader.next_prepared(feed.stage)
    batch = feed.take(
        staged, replicas=groups.data.size, loss_scale=loss_scale, by_microbatch=by_microbatch
    )
    loader.read_ahead(feed.stage)  # only now: the batch that was taken has made room
    return batch


@contextmanager
def _faults_of_data() -> Iterator[None]:
    """Report faults of the data as the user's mistakes."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
