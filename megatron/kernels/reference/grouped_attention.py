"""Attention with query groups by CUDA's memory-efficient kernel, which knows no groups.

Flash attention knows groups, but not fp32; the memory-efficient kernel takes fp32. It reads keys
and values that are repeated for every query head. They are repeated right before the kernel runs,
in the forward and once more in the backward. In between only the keys and values of groups are
kept. The slices of a microbatch share these, so a slice keeps no keys of its own.

Shapes: b batch, a query heads, g key/value heads, r = a / g, s positions of queries, z positions of
keys, d channels of a head.
"""

from typing import Any, Final

import torch
from torch import Tensor

from megatron.kernels.autograd import apply, once_differentiable

_FROM_FIRST_KEY: Final = 1
"""The kernel's causal mask in which query i sees the keys up to key i."""

_TO_LAST_KEY: Final = 2
"""The kernel's causal mask in which the last query sees all keys."""

_BYTES_AT_ONCE: Final = 16

_aten = torch.ops.aten


def knows_repeated(q_basd: Tensor, k_bgzd: Tensor) -> bool:
    """Return whether ``grouped_attention`` is the way to attend: fp32 with query groups.

    The kernel reads 16 bytes of a head at once.
    """
    is_aligned = q_basd.shape[3] * q_basd.element_size() % _BYTES_AT_ONCE == 0
    return q_basd.dtype == torch.float32 and q_basd.shape[1] != k_bgzd.shape[1] and is_aligned


def grouped_attention(
    q_basd: Tensor, k_bgzd: Tensor, v_bgzd: Tensor, dropout: float, scale: float | None
) -> Tensor:
    """Return causal attention whose scores are scaled products; see ``Kernels.causal_attention``.

    Args:
        q_basd: queries of the last s of z positions, on a GPU or without values.
        k_bgzd: keys.
        v_bgzd: values.
        dropout: probability of dropping an attention weight.
        scale: factor of the products; ``None``: 1 / sqrt(d).
    """
    return apply(_GroupedAttention, q_basd, k_bgzd, v_bgzd, dropout, scale)


class _GroupedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_basd: Tensor,
        k_bgzd: Tensor,
        v_bgzd: Tensor,
        dropout: float,
        scale: float | None,
    ) -> Tensor:
        is_whole = q_basd.shape[2] == k_bgzd.shape[2]
        ctx.mask = _FROM_FIRST_KEY if is_whole else _TO_LAST_KEY
        ctx.dropout, ctx.scale = dropout, scale
        copies = q_basd.shape[1] // k_bgzd.shape[1]
        out_bsad, sums, seed, offset, *ctx.lengths = _aten._efficient_attention_forward(
            q_basd.transpose(1, 2),
            _repeated(k_bgzd, copies),
            _repeated(v_bgzd, copies),
            None,
            None,
            None,
            None,
            None,
            dropout,
            ctx.mask,
            any(ctx.needs_input_grad),
            scale=scale,
        )
        out_basd: Tensor = out_bsad.transpose(1, 2)
        ctx.save_for_backward(q_basd, k_bgzd, v_bgzd, out_basd, sums, seed, offset)
        return out_basd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_basd: Tensor) -> tuple[Tensor | None, ...]:
        q_basd, k_bgzd, v_bgzd, out_basd, sums, seed, offset = ctx.saved_tensors
        groups = k_bgzd.shape[1]
        copies = q_basd.shape[1] // groups
        # Without values PyTorch gives the arguments from ``out`` on to the wrong parameters, so
        # that ``scale`` would have two values. It changes no shape, and so is left out there.
        scale = {} if q_basd.is_meta else {"scale": ctx.scale}
        dq_bsad, dk_bzad, dv_bzad, _ = _aten._efficient_attention_backward(
            grad_basd.transpose(1, 2),
            q_basd.transpose(1, 2),
            _repeated(k_bgzd, copies),
            _repeated(v_bgzd, copies),
            None,
            out_basd.transpose(1, 2),
            None,
            None,
            *ctx.lengths,
            sums,
            ctx.dropout,
            seed,
            offset,
            ctx.mask,
            False,
            **scale,
        )
        dk_bgzd, dv_bgzd = (
            t_bzad.unflatten(2, (groups, copies)).sum(3).transpose(1, 2)
            for t_bzad in (dk_bzad, dv_bzad)
        )
        return dq_bsad.transpose(1, 2), dk_bgzd, dv_bgzd, None, None


def _repeated(t_bgzd: Tensor, copies: int) -> Tensor:
    """Return keys or values for every query head, as [b, z, a, d]."""
    t_bazd: Tensor = t_bgzd.repeat_interleave(copies, dim=1)
    return t_bazd.transpose(1, 2)
