"""Ends a run whose loss or gradient is infinite or NaN, and says where the value came from."""

from collections.abc import Sequence
from typing import NoReturn

import torch

from megatron.optimizer.grad_norm import local_sum_of_squares
from megatron.runtime.batch import DeviceMicrobatch
from megatron.training.setup import TrainState
from megatron.training.words import ranks_in_words, samples_in_words


def report_not_finite(
    state: TrainState,
    number: int,
    batch: Sequence[DeviceMicrobatch],
    loss: float,
    samples: range,
) -> NoReturn:
    """Find the origin of an infinity or NaN, and end the run; weights and gradients do not change.

    All ranks call it.

    ``samples`` are the samples of the global batch, by their place in the order of training.

    Raises:
        FloatingPointError: always.
    """
    found = _where_not_finite(state, batch, samples)
    steps = state.optimizer.steps
    advice = (
        "lower --lr, or look at these samples"
        if steps
        else "no step was taken before, so look at these samples and at the weights that the run "
        "begins with (--load, --init-method-std)"
    )
    raise FloatingPointError(
        f"iteration {number + 1}: lm loss is {loss}: {found}: {advice}; --iterations-to-skip "
        f"{number + 1} passes over them"
    )


def _where_not_finite(state: TrainState, batch: Sequence[DeviceMicrobatch], samples: range) -> str:
    """Return the rank and the samples where infinity or NaN comes first; all ranks call it."""
    where = state.pipeline.first_not_finite(batch)
    if where is not None:
        own_number, rank, what = where
        microbatch = own_number * state.groups.replica[1] + state.groups.grid.coordinates(rank).data
        size = batch[own_number].samples
        there = samples[microbatch * size : (microbatch + 1) * size]
        return (
            f"rank {rank} saw it first, in {what}, microbatch {microbatch} of the global batch, "
            f"{samples_in_words(there)}"
        )
    squares = local_sum_of_squares(state.counted, state.kernels, state.groups.device)
    own = bool(torch.isfinite(squares))
    finite = state.groups.world.all_gather_object(own)
    ranks = ranks_in_words(rank for rank, is_finite in enumerate(finite) if not is_finite)
    return (
        f"the forward is finite, the gradient is not, on {ranks}; the global batch has "
        f"{samples_in_words(samples)}"
    )
