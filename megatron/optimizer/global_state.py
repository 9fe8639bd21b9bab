"""The loss and the gradient norm of the whole model, added up over the ranks for a step.

The sum goes in the order of the ranks, because floating-point sums depend on the order. A step that
is checked afterwards (``post_validation``) must give the same bits as a step that waited.

Losses are weighted as if every token of the global batch counted. Together with the sums goes the
number of those that do, and what was left out is one factor on loss, norm and gradients.
"""

import functools
import math
import operator
from collections.abc import Iterable
from dataclasses import astuple, dataclass

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
        sum_of_squares: of the gradients of that sum, float64.
        tokens: of the batch; one rank of each replica has them, the others 0.
        valid_tokens: those that count.
    """

    weighted_loss: float
    sum_of_squares: float
    tokens: float = 0.0
    valid_tokens: float = 0.0

    def __add__(self, other: "GlobalState") -> "GlobalState":
        return GlobalState(*map(operator.add, astuple(self), astuple(other)))

    @property
    def is_finite(self) -> bool:
        """Whether neither loss nor gradients hold infinity or NaN."""
        return math.isfinite(self.weighted_loss) and math.isfinite(self.sum_of_squares)

    @property
    def factor(self) -> float:
        """The number of all tokens by that of the tokens that count; 1 if none does."""
        return self.tokens / self.valid_tokens if self.valid_tokens else 1.0

    @property
    def loss(self) -> float:
        """Mean over the tokens that count, 0 if none does."""
        return self.factor * self.weighted_loss

    @property
    def grad_norm(self) -> float:
        """Norm of the gradients of ``loss``, before clipping."""
        return self.factor * math.sqrt(self.sum_of_squares)


def own_totals(
    loss: torch.Tensor,
    parts: Iterable[ParameterPart],
    tokens: tuple[float, float],
    kernels: Kernels,
    loss_scale: float = 1.0,
) -> torch.Tensor:
    """Return this rank's part of a ``GlobalState``, float64 [4] on the device.

    Args:
        loss: this rank's part of the weighted loss, a scalar.
        parts: whose gradients this rank adds to the norm: of several replicas each takes its own
            shard of the reduced gradients.
        tokens: all tokens of the replica's batch and those that count, on one of its ranks; 0 on
            the others.
        kernels: of the device.
        loss_scale: that loss and gradients hold, and the sums do not.
    """
    squares = local_sum_of_squares(parts, kernels, loss.device)
    sums = torch.stack([loss.double() / loss_scale, squares / loss_scale**2])
    return torch.cat([sums, torch.tensor(tokens, dtype=torch.float64).to(sums.device)])


def over_ranks(totals: torch.Tensor, axis: ConnectedAxis) -> torch.Tensor:
    """Return sums over an axis of what ``own_totals`` returned, the same on each of its ranks."""
    if axis.size == 1:
        return totals
    summed: torch.Tensor = functools.reduce(operator.add, all_gather(totals, axis).unbind())
    return summed


def add_up(totals: torch.Tensor, axis: ConnectedAxis) -> GlobalState:
    """Return the sum over ``axis`` of what ``own_totals`` returned; one wait for the device."""
    by_rank = all_gather(totals, axis).tolist()
    # Not sum(): from Python 3.12 on it compensates rounding errors, which a running sum cannot.
    return functools.reduce(operator.add, (GlobalState(*own) for own in by_rank))
