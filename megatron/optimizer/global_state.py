"""The loss and the gradient norm of the whole model, added up over the ranks for a step.

The sum goes in the order of the ranks, because floating-point sums depend on the order. A step that
is checked afterwards (``post_validation``) must give the same bits as a step that waited.
"""

import functools
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron.optimizer.grad_norm import local_sum_of_squares
from megatron.optimizer.parameters import OptimizedParameter
from megatron.parallel.collectives import all_gather
from megatron.parallel.groups import ConnectedAxis


@dataclass(frozen=True)
class GlobalState:
    """Sums over one rank, over the first ranks, or over all.

    Attributes:
        loss: part of the loss.
        sum_of_squares: of the gradients, float64.
    """

    loss: float
    sum_of_squares: float

    def __add__(self, other: "GlobalState") -> "GlobalState":
        return GlobalState(self.loss + other.loss, self.sum_of_squares + other.sum_of_squares)

    @property
    def is_finite(self) -> bool:
        """Whether neither loss nor gradients hold infinity or NaN."""
        return math.isfinite(self.loss) and math.isfinite(self.sum_of_squares)

    @property
    def grad_norm(self) -> float:
        """Norm of the gradients in the sum, before clipping."""
        return math.sqrt(self.sum_of_squares)


def own_totals(loss: torch.Tensor, parameters: Iterable[OptimizedParameter]) -> torch.Tensor:
    """Return this rank's (loss, sum of squares), float64 [2] on the device.

    Args:
        loss: this rank's part of the loss, a scalar.
        parameters: of this rank, with their main gradients.
    """
    return torch.stack([loss.double(), local_sum_of_squares(parameters)])


def add_up(totals: torch.Tensor, axis: ConnectedAxis) -> GlobalState:
    """Return the sum over ``axis`` of what ``own_totals`` returned; one wait for the device."""
    by_rank = all_gather(totals, axis).tolist()
    # Not sum(): from Python 3.12 on it compensates rounding errors, which a running sum cannot.
    return functools.reduce(operator.add, (GlobalState(*own) for own in by_rank))
