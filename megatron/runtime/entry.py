"""How a tensor enters the graph of a stage, which keeps no memory of it.

A leaf of autograd keeps its data as long as the graph is there. The data of a stage's input are
needed only by operations that keep them for their own backward: a norm does, a sum of words' and
positions' embeddings does not. So the input enters as the result of an operation whose backward
takes the gradient.
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
        anchor = torch.empty(0, requires_grad=True)  # it makes the result require a gradient
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
        # A stage may begin with a transposition; a gradient that is sent must lie in one piece.
        ctx.gradients.extend(gradient.contiguous() for gradient in grads)
        return None, None, None
