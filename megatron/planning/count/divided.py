"""Divides the record of a stage's F and B where the stage's layers begin, and where they end.

The counts of layers that were counted apart are inserted there. All other work of a stage, such as
an embedding, a norm or the gathering of a gradient, is recorded before or after the layers.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.autograd.function import once_differentiable

from megatron.kernels.autograd import apply
from megatron.model.borders import Borders
from megatron.planning.count.recorder import Recorder

LAYERS: Final = 1
"""Index of the part of an F or a B that has the layers."""


@dataclass(frozen=True)
class CountedBorders(Borders):
    """Divides F and B where the layers of a chunk begin and end.

    Attributes:
        recorder: records the passes.
        between: whether other layers follow. The backward of these layers makes a new gradient.
    """

    recorder: Recorder
    between: bool

    def begin(self, x_bsh: torch.Tensor, used: object) -> torch.Tensor:
        """See ``Borders``.

        ``used`` has the rotations of the pass, which all layers of the stage use. So they stay
        until the first layer is through, even if other layers are counted apart.
        """
        same_bsh: torch.Tensor = apply(_Border, x_bsh, self.recorder, False, used)
        return same_bsh

    def end(self, x_bsh: torch.Tensor) -> torch.Tensor:
        """See ``Borders``."""
        same_bsh: torch.Tensor = apply(_Border, x_bsh, self.recorder, self.between, None)
        return same_bsh


class _Border(torch.autograd.Function):
    """Divides the recorded work, in the forward and in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, recorder: Recorder, anew: bool, kept: object
    ) -> torch.Tensor:
        """Return the same tensor; ``kept`` stays as long as the graph."""
        ctx.recorder, ctx.anew, ctx.kept = recorder, anew, kept
        recorder.divide()
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Return the same gradient, or a new one if ``anew``."""
        grad = torch.empty_like(grad) if ctx.anew else grad
        ctx.recorder.divide()
        return grad, None, None, None
