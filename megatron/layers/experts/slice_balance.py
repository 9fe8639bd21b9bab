"""The balancing loss of experts, for whole microbatches and for slices of them.

The loss compares the experts' shares of the choices of a whole microbatch. These shares are known
only after the F of the last slice. The shares have no gradient: they are factors of the mean
scores. So a slice's B, which runs after all F of the microbatch, can form the gradient. The loss is
a sum of one linear term for each slice. Only the F of the last slice can form this sum, and leaves
the loss for all slices.

Shapes: x samples, or 1 if a loss puts them together; e experts.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.kernels.autograd import apply, once_differentiable
from megatron.layers.slices import SeenChoices, SequenceSlice, SlicedPass


def imbalance(times_xe: Tensor, scores_xe: Tensor) -> Tensor:
    """Return the balancing loss, the mean over x.

    Args:
        times_xe: int64, how often every expert is chosen.
        scores_xe: mean scores of every expert.
    """
    shares_xe = times_xe / times_xe.sum(-1, keepdim=True)
    return times_xe.shape[-1] * (shares_xe.to(scores_xe.dtype) * scores_xe).sum(-1).mean()


def imbalance_of_slices(
    times_xe: Tensor, scores_xe: Tensor, sliced: SlicedPass, loss: tuple[int, str]
) -> Tensor:
    """Return a slice's part of the balancing loss of its microbatch, as a mean over its tokens.

    The gradient is that of the slice's own part. The value is 0 for all slices except the last one:
    the last slice has the value for all slices together.

    Args:
        times_xe: int64, how often the slice's tokens choose every expert.
        scores_xe: mean scores of every expert over these tokens.
        sliced: the slice, and the choices of earlier slices.
        loss: the layer's index in the whole model, and the loss's name.
    """
    sliced.choices.put(loss, sliced.part, times_xe, scores_xe.detach())
    return apply(_OfSlice, scores_xe, sliced.part, sliced.choices, loss)


class _OfSlice(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores_xe: Tensor,
        part: SequenceSlice,
        choices: SeenChoices,
        loss: tuple[int, str],
    ) -> Tensor:
        ctx.choices, ctx.loss = choices, loss
        if not part.is_last:
            return scores_xe.new_zeros(())
        # The loss of a slice is weighted by its share of the tokens; this value is for all of them.
        return imbalance(choices.times(loss), choices.means(loss)) / part.fraction

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        times_xe = ctx.choices.times(ctx.loss)
        shares_xe = times_xe / times_xe.sum(-1, keepdim=True)
        samples, experts = times_xe.shape
        return grad * experts / samples * shares_xe.to(grad.dtype), None, None, None
