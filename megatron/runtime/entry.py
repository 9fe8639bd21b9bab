"""A way for a tensor to enter the graph of a stage without being kept alive by the graph.

An autograd leaf stays in memory as long as the graph. But a stage's input is needed only by
operations that save it for their own backward: a norm saves it, a sum of word and position
embeddings does not. So the input is not a leaf. It enters as the result of an operation whose
backward takes the gradient.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.kernels.autograd import apply


class Entry:
    """The place where a tensor enters a graph, and where its gradient comes out."""

    def __init__(self) -> None:
        self._gradients: list[Tensor] = []

    def connect(self, x: Tensor) -> Tensor:
        """Return ``x``, on the same memory, as an input of the graph."""
        anchor = torch.empty(0, requires_grad=True)  # makes the result require a gradient
        return apply(_Entering, anchor, x, self._gradients)

    def take_gradient(self) -> Tensor:
        """Return the gradient that the backward has left."""
        [gradient] = self._gradients
        self._gradients.clear()
        return gradient


class _Entering(torch.autograd.Function):
    """Passes a tensor on, and leaves its gradient in a list."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, gradients: list[Tensor]) -> Tensor:
        ctx.gradients = gradients
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        # A stage may begin with a transposition, but a gradient to send must be contiguous.
        ctx.gradients.extend(gradient.contiguous() for gradient in grads)
        return None, None, None
