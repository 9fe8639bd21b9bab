"""Rotary position embedding: pairs of a head's channels turn by an angle that grows with position.

Channel i of the first half of the rotated part pairs with channel i of its second half (the
"half rotation" of GPT-NeoX and Megatron, not the interleaved pairs of the paper, arXiv 2104.09864).

Shapes: b batch, s sequence, a heads, d channels of a head, r rotated pairs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.kernels.autograd import apply


class RotaryEmbedding:
    """Angles ``position * base ** (-2i / rotated channels)``, computed in float64, kept in fp32.

    It is not a module, because casting a model to bf16 must not cast the angles.

    Args:
        head_size: channels d of a head.
        seq_length: positions in the table.
        rotary_percent: share of the channels that turn; the others pass unchanged.
        rotary_base: theta of the paper.
        device: where the table lives.

    Raises:
        ValueError: the rotated channels cannot be paired.
    """

    def __init__(
        self,
        head_size: int,
        seq_length: int,
        rotary_percent: float,
        rotary_base: int,
        device: torch.device,
    ) -> None:
        rotated = int(head_size * rotary_percent)
        if rotated < 2 or rotated % 2 or rotated > head_size:
            raise ValueError(
                f"--rotary-percent {rotary_percent} rotates {rotated} of the {head_size} channels "
                "of a head: choose a share that makes an even number of them, at least 2"
            )
        exponent_r = torch.arange(0, rotated, 2, dtype=torch.float64) / rotated
        position_s = torch.arange(seq_length, dtype=torch.float64)
        angle_s1r = torch.outer(position_s, float(rotary_base) ** -exponent_r)[:, None]
        self._cos_s1r = angle_s1r.cos().to(device, torch.float32)
        self._sin_s1r = angle_s1r.sin().to(device, torch.float32)

    def __call__(self, x_bsad: Tensor) -> Tensor:
        """Turn the heads at position i by the i-th angles.

        Args:
            x_bsad: queries or keys [b, s, a, d], any floating type, any strides.

        Returns:
            A contiguous tensor of the shape and type of ``x_bsad``; bf16 is rounded once, at the
            end.
        """
        seq_length = x_bsad.shape[1]
        assert seq_length <= len(self._cos_s1r), (seq_length, len(self._cos_s1r))
        return apply(_Rotation, x_bsad, self._cos_s1r[:seq_length], self._sin_s1r[:seq_length])


class _Rotation(torch.autograd.Function):
    """Its backward rotates back, since a rotation is orthogonal; only the angles are saved."""

    @staticmethod
    def forward(ctx: Any, x_bsad: Tensor, cos_s1r: Tensor, sin_s1r: Tensor) -> Tensor:
        ctx.save_for_backward(cos_s1r, sin_s1r)
        return _turn(x_bsad, cos_s1r, sin_s1r)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_bsad: Tensor) -> tuple[Tensor, None, None]:
        cos_s1r, sin_s1r = ctx.saved_tensors
        return _turn(grad_bsad, cos_s1r, -sin_s1r), None, None


def _turn(x_bsad: Tensor, cos_s1r: Tensor, sin_s1r: Tensor) -> Tensor:
    pairs = cos_s1r.shape[-1]
    # fp32 for bf16 inputs, float64 for float64 ones
    wide_type = torch.promote_types(x_bsad.dtype, cos_s1r.dtype)
    first, second, rest = x_bsad.split([pairs, pairs, x_bsad.shape[-1] - 2 * pairs], dim=-1)
    first, second = first.to(wide_type), second.to(wide_type)
    out = torch.empty(x_bsad.shape, dtype=x_bsad.dtype, device=x_bsad.device)
    out[..., :pairs] = (first * cos_s1r).sub_(second * sin_s1r)
    out[..., pairs : 2 * pairs] = (second * cos_s1r).add_(first * sin_s1r)
    out[..., 2 * pairs :] = rest
    return out
