"""The loss and the gradient norm of the whole model, added up over the ranks for a step.

The ranks are added in order, because floating-point sums depend on the order. A step that is
checked afterwards (``post_validation``) must give the same bits as a step that waited.

Losses are weighted as if every token of the global batch counted. The number of tokens that really
count is summed too. From this number follows one factor, which corrects loss, norm and gradients.
(If every microbatch has the same weight, the factor corrects only the reported loss.)
"""

import functools
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron.kernels.face import Kernels
from megatron.optimizer.grad_norm import local_sum_of_squares
from megatron.optimizer.parameters import ParameterPart
from megatron.parallel.collectives import all_gather
from megatron.parallel.groups import ConnectedAxis


@dataclass(frozen=True)
class GlobalState:
    """Sums over one rank, over the first ranks, or over all.

    Attributes:
        weighted_loss: sum of losses, each divided by the number of all tokens.
        sum_of_squares: of the gradients of ``weighted_loss``, float64.
        tokens: number of tokens in the batch, given by one rank of each replica; others give 0.
        valid_tokens: number of tokens that count.
        further: further sums, such as losses of layers; their maker knows what they mean.
        by_microbatch: whether the gradients, and the losses of layers, are means over microbatches
            already (``megatron.runtime.batch``), so that the number of tokens that count changes
            nothing in them.
    """

    weighted_loss: float
    sum_of_squares: float
    tokens: float = 0.0
    valid_tokens: float = 0.0
    further: tuple[float, ...] = ()
    by_microbatch: bool = False

    @classmethod
    def of(cls, values: Iterable[float], *, by_microbatch: bool = False) -> "GlobalState":
        """Return the state with these ``values``."""
        loss, squares, tokens, valid, *further = values
        return cls(loss, squares, tokens, valid, tuple(further), by_microbatch)

    @property
    def values(self) -> tuple[float, ...]:
        """All numbers, one after the other."""
        counts = self.tokens, self.valid_tokens
        return (self.weighted_loss, self.sum_of_squares, *counts, *self.further)

    def __add__(self, other: "GlobalState") -> "GlobalState":
        both = zip(self.values, other.values, strict=True)
        summed = (own + others for own, others in both)
        return GlobalState.of(summed, by_microbatch=self.by_microbatch)

    @property
    def is_finite(self) -> bool:
        """Whether neither losses nor gradients hold infinity or NaN."""
        return all(map(math.isfinite, self.values))

    @property
    def factor(self) -> float:
        """The factor that gradients, and losses of layers, still need."""
        return 1.0 if self.by_microbatch else self._all_by_counting

    @property
    def _all_by_counting(self) -> float:
        """The number of all tokens divided by the number that count; 1 if no token counts."""
        return self.tokens / self.valid_tokens if self.valid_tokens else 1.0

    @property
    def loss(self) -> float:
        """Mean loss over the tokens that count; 0 if no token counts."""
        return self._all_by_counting * self.weighted_loss

    @property
    def grad_norm(self) -> float:
        """Norm of the gradients, before clipping."""
        return self.factor * math.sqrt(self.sum_of_squares)


def own_totals(
    losses: torch.Tensor,
    parts: Iterable[ParameterPart],
    tokens: tuple[float, float],
    kernels: Kernels,
    loss_scale: float = 1.0,
    unscaled: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return this rank's part of a ``GlobalState``, float64 on the device.

    Args:
        losses: this rank's part of the weighted loss, and of further losses, one-dimensional.
        parts: parts of parameters whose gradients this rank adds to the norm. With several
            replicas, each has its own shard of the reduced gradients.
        tokens: number of tokens in the replica's batch, and number of those that count. One rank of
            the replica gives these numbers, and all its other ranks give 0.
        kernels: of the device.
        loss_scale: factor in ``losses`` and in the gradients; the result is divided by it.
        unscaled: further sums without this factor, float64, one-dimensional.
    """
    squares = local_sum_of_squares(parts, kernels, losses.device)
    losses = losses.double() / loss_scale
    counts = torch.tensor(tokens, dtype=torch.float64).to(losses.device)
    further = [losses[1:]] if unscaled is None else [losses[1:], unscaled]
    # Gradients have the loss scale as a factor, so their squares have it twice.
    return torch.cat([losses[:1], (squares / loss_scale**2).view(1), counts, *further])


def over_ranks(totals: torch.Tensor, axis: ConnectedAxis) -> torch.Tensor:
    """Return results of ``own_totals`` summed over an axis, the same on each of its ranks."""
    if axis.size == 1:
        return totals
    summed: torch.Tensor = functools.reduce(operator.add, all_gather(totals, axis).unbind())
    return summed


def add_up(
    totals: torch.Tensor, axis: ConnectedAxis, *, by_microbatch: bool = False
) -> GlobalState:
    """Return results of ``own_totals`` summed over ``axis``; the host waits for the device once."""
    by_rank = all_gather(totals, axis).tolist()
    states = (GlobalState.of(own, by_microbatch=by_microbatch) for own in by_rank)
    # Not sum(): from Python 3.12 on it compensates rounding errors, unlike the sums of
    # ``post_validation``, which must have the same bits.
    return functools.reduce(operator.add, states)
