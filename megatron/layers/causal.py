"""Causal attention: PyTorch's fused kernels, with a faster backward for short sequences on CPU.

The backward of PyTorch's CPU kernel works in tiles too small for the matrix units of the core: six
times its forward where the arithmetic asks for two and a half. As long as a slice of the scores
stays in cache, a few batched matrix products over blocks of queries do better; they recompute the
probabilities from queries and keys, so that nothing quadratic in s outlives the pass.

Shapes: b batch, a query heads, g key/value heads, r = a / g, s sequence, d channels of a head,
x = b g; q queries of a block times r, k keys up to the end of that block.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

# bf16, 8 heads of 64 channels, one core, backward in ms, PyTorch / ours:
# s = 512: 10.6 / 5.6, s = 1024: 25 / 20 to 24, s = 2048 with 128 channels: 108 / 230.
# Ours allocates: where the C library returns freed memory to the system, page faults eat the gain.
_LONGEST = 512
_BLOCK = 256


def causal_attention(q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, *, dropout: float) -> Tensor:
    """softmax(q kᵀ / sqrt(d)) v, every position seeing itself and those before it.

    Args:
        q_basd: queries [b, a, s, d]; transposed views are taken as they are.
        k_bgsd: keys [b, g, s, d]; a is a multiple of g.
        v_bgsd: values [b, g, s, d].
        dropout: probability of dropping an attention weight, 0 outside training.

    Returns:
        [b, a, s, d], laid out in memory as [b, s, a, d] where the kernel allows.
    """
    if q_basd.device.type == "cpu" and dropout == 0.0 and q_basd.shape[2] <= _LONGEST:
        return _ShortCausalAttention.apply(q_basd, k_bgsd, v_bgsd)
    return _fused(q_basd, k_bgsd, v_bgsd, dropout)


def _fused(q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, dropout: float) -> Tensor:
    grouped = q_basd.shape[1] != k_bgsd.shape[1]
    if grouped and q_basd.is_cuda and q_basd.dtype == torch.float32:
        # CUDA's flash kernel knows groups but no fp32, its memory-efficient one fp32 but no groups
        copies = q_basd.shape[1] // k_bgsd.shape[1]
        k_bgsd, v_bgsd = (t.repeat_interleave(copies, dim=1) for t in (k_bgsd, v_bgsd))
        grouped = False
    return functional.scaled_dot_product_attention(
        q_basd, k_bgsd, v_bgsd, dropout_p=dropout, is_causal=True, enable_gqa=grouped
    )


class _ShortCausalAttention(torch.autograd.Function):
    """PyTorch's forward, our backward."""

    @staticmethod
    def forward(ctx: Any, q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor) -> Tensor:
        ctx.save_for_backward(q_basd, k_bgsd, v_bgsd)
        return _fused(q_basd, k_bgsd, v_bgsd, dropout=0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_basd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_basd, k_bgsd, v_bgsd = ctx.saved_tensors
        groups = k_bgsd.shape[1]
        # batched products want dense matrices: four small copies save as many strided ones
        k_xsd, v_xsd = (t.flatten(0, 1).contiguous() for t in (k_bgsd, v_bgsd))
        q_xrsd, grad_xrsd = (
            t.unflatten(1, (groups, -1)).flatten(0, 1).contiguous() for t in (q_basd, grad_basd)
        )
        gradients = _backward(q_xrsd, k_xsd, v_xsd, grad_xrsd)
        return tuple(g.view(t.shape) for g, t in zip(gradients, ctx.saved_tensors, strict=True))


def _backward(
    q_xrsd: Tensor, k_xsd: Tensor, v_xsd: Tensor, grad_xrsd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, one block of queries after the other."""
    heads, seq_length, size = q_xrsd.shape[1:]
    scale = 1 / math.sqrt(size)
    q_xrsd = q_xrsd * scale
    dq_xrsd, dk_xsd, dv_xsd = (torch.empty_like(t) for t in (q_xrsd, k_xsd, v_xsd))
    # from the last block, which sees all keys: it writes dk and dv, the others add to them
    for start in reversed(range(0, seq_length, _BLOCK)):
        end = min(start + _BLOCK, seq_length)
        q_xqd, grad_xqd = (t[:, :, start:end].flatten(1, 2) for t in (q_xrsd, grad_xrsd))
        k_xkd, v_xkd = k_xsd[:, :end], v_xsd[:, :end]
        prob_xqk = _probabilities(q_xqd, k_xkd, heads, start)
        dprob_xqk = grad_xqd @ v_xkd.mT
        dv_xkd = prob_xqk.mT @ grad_xqd
        dscore_xqk = torch._softmax_backward_data(dprob_xqk, prob_xqk, -1, prob_xqk.dtype)
        dk_xkd = dscore_xqk.mT @ q_xqd
        dq_xrsd[:, :, start:end] = (dscore_xqk @ k_xkd).unflatten(1, (heads, -1))
        if end == seq_length:
            dk_xsd, dv_xsd = dk_xkd, dv_xkd
        else:
            dk_xsd[:, :end] += dk_xkd
            dv_xsd[:, :end] += dv_xkd
    return dq_xrsd.mul_(scale), dk_xsd, dv_xsd


def _probabilities(q_xqd: Tensor, k_xkd: Tensor, heads: int, start: int) -> Tensor:
    """Softmax of the scaled scores of a block of queries, whose first one is at ``start``."""
    score_xqk = q_xqd @ k_xkd.mT
    block = score_xqk.shape[-1] - start
    future = torch.full((block, block), -math.inf, dtype=q_xqd.dtype).triu_(1)
    score_xqk.unflatten(1, (heads, block))[..., start:] += future
    return torch.softmax(score_xqk, dim=-1)
