"""RMSNorm over the channels of all heads at once, for queries or keys before they are rotated.

Tensor-parallel ranks have some of the heads each. A rank sums the squares of its own channels, and
the ranks exchange one sum for each token.

Shapes: b batch, s sequence, a heads of this rank, d channels of a head.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron.kernels.autograd import apply, once_differentiable
from megatron.kernels.softmax import statistics_dtype
from megatron.layers.site import Site
from megatron.layers.tensor_cut import Cut, Holding
from megatron.parallel.tensor import TensorParallel


class HeadsNorm(nn.Module):
    """RMSNorm of [b, s, a, d] over a and d, with a scale for every channel of every head.

    Args:
        channels: channels of all heads of all ranks.
        epsilon: added to the mean square.
        site: device, dtype, ranks and kernels of the norm.
        zero_centred: the parameter is the scale minus 1, so that it starts at 0.

    Attributes:
        holdings: how the ranks hold the scale; see ``SaysHoldings``.
    """

    def __init__(self, channels: int, epsilon: float, site: Site, *, zero_centred: bool) -> None:
        super().__init__()
        self._channels, self._epsilon, self._zero_centred = channels, epsilon, zero_centred
        self._tensor, self._kernels = site.tensor, site.kernels
        own = torch.ones(channels // site.tensor.size, dtype=site.dtype, device=site.device)
        self.weight = nn.Parameter(own.zero_() if zero_centred else own)
        self.holdings: Mapping[str, Holding] = {"weight": Cut(0)} if site.tensor.size > 1 else {}

    def forward(self, x_bsad: Tensor) -> Tensor:
        """[b, s, a, d] -> [b, s, a, d], in the type of the input."""
        scale = self.weight + 1 if self._zero_centred else self.weight
        x_bsc = x_bsad.flatten(2)
        if self._tensor.size == 1:
            return self._kernels.rms_norm(x_bsc, scale, self._epsilon).view(x_bsad.shape)
        wide_bsc = x_bsc.to(statistics_dtype(x_bsc.dtype))
        squares_bs1 = apply(_SumOfRanks, wide_bsc.square().sum(-1, keepdim=True), self._tensor)
        inverse_bs1 = (squares_bs1 / self._channels + self._epsilon).rsqrt()
        return (wide_bsc * inverse_bs1 * scale).to(x_bsad.dtype).view(x_bsad.shape)


class _SumOfRanks(torch.autograd.Function):
    """The sum over the ranks, on every rank; its backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorParallel) -> Tensor:
        ctx.tensor = tensor
        return tensor.all_gather(x.contiguous()).sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.tensor.all_gather(grad.contiguous()).sum(0), None
