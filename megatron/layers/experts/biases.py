"""Biases of experts: biases of first layers join slots, biases of second layers join tokens.

Shapes: b batch, u tokens of a sequence that a rank has outside of the layer, k choices of a token,
z slots of this rank, o outputs of a layer, h hidden; e experts of this rank, E of the layer.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.kernels.autograd import apply, once_differentiable
from megatron.kernels.face import Kernels
from megatron.layers.experts.router import Choice

_COLUMNS = 8
"""Columns of the narrowest factor that a grouped product takes, in types of 2 bytes and more."""


def with_biases(y_zo: Tensor, bias_eo: Tensor, ends_e: Tensor, kernels: Kernels) -> Tensor:
    """Return every slot plus the bias of its expert, [z, o].

    Args:
        y_zo: slots, in the order of their experts.
        bias_eo: a bias for each expert.
        ends_e: the end of the slots of each expert, int32.
        kernels: of the device.
    """
    return apply(_WithBiases, y_zo, bias_eo, ends_e, kernels)


class _WithBiases(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y_zo: Tensor, bias_eo: Tensor, ends_e: Tensor, kernels: Kernels
    ) -> Tensor:
        ctx.save_for_backward(ends_e)
        ctx.kernels = kernels
        slots_z = torch.arange(len(y_zo), device=ends_e.device)
        experts_z = torch.searchsorted(ends_e.long(), slots_z, right=True)
        return bias_eo.index_select(0, experts_z).add_(y_zo)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_zo: Tensor) -> tuple[Tensor | None, ...]:
        (ends_e,) = ctx.saved_tensors
        grad_zo = grad_zo.contiguous()
        # The sum of an expert's slots is their product with a column of ones.
        ones_zc = grad_zo.new_ones(len(grad_zo), _COLUMNS)
        sums_eoc = ctx.kernels.grouped_weight_product(grad_zo, ones_zc, ends_e)
        return grad_zo, sums_eoc[..., 0], None, None


def weighted_biases(choice: Choice, bias_eh: Tensor) -> Tensor:
    """Return the weighted sum of the biases of every token's experts, [b, u, h].

    The sum is formed where the token is, so that each bias counts once in every layout.

    Args:
        choice: of this rank's tokens.
        bias_eh: the biases of all experts of the layer, [E, h].
    """
    weights_buk = choice.weights_buk.to(bias_eh.dtype)
    all_weights_bue = weights_buk.new_zeros(*weights_buk.shape[:-1], len(bias_eh))
    return all_weights_bue.scatter(-1, choice.experts_buk, weights_buk) @ bias_eh
