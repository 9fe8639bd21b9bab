"""Divides the record of a stage's F and B where the stage's layers begin, and where they end.

The counts of layers that were counted apart are inserted there. All other work of a stage, such as
an embedding, a norm or the gathering of a gradient, is recorded before or after the layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.autograd.function import once_differentiable

from megatron.kernels.autograd import apply
from megatron.layers.recompute import Again, Layer, Recomputation
from megatron.planning.count.recorder import Recorder

LAYERS: Final = 1
"""Index of the part of an F or a B that has the layers."""


@dataclass(frozen=True)
class DividedAtLayers(Recomputation):
    """Runs the layers of a chunk as usual, and divides F and B where the layers begin and end.

    Attributes:
        recorder: records the passes.
        between: whether other layers follow. The backward of these layers makes a new gradient.
    """

    recorder: Recorder = field(kw_only=True)
    between: bool = field(kw_only=True)

    def run(
        self,
        layers: Sequence[Layer],
        forward: Callable[[Layer, torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        left_out: list[Again] | None = None,
    ) -> torch.Tensor:
        """Run the layers of a chunk between two borders; arguments as for ``Recomputation.run``."""
        # ``forward`` has the rotations of the pass, which all layers of the stage use. So they stay
        # until the first layer is through, even if other layers are counted apart.
        x = apply(_Border, x, self.recorder, False, forward)
        y = super().run(layers, forward, x, left_out)
        return apply(_Border, y, self.recorder, self.between, None)


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
