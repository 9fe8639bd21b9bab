"""Causal attention: the fastest way there is for the device, the type and the length.

That is PyTorch's fused kernel, except for short sequences on a CPU, where it works in tiles too
small for the matrix units of the core. There ``compiled_attention`` does better in bf16; in other
types batched products do so in the backward, where they also round less (the gradients of a row's
scores sum to zero).

Shapes: b batch, a query heads, g key/value heads, r = a / g, s sequence, d channels of a head,
x = b g; q queries of a block times r, k keys up to the end of that block.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megatron.layers import compiled_attention
from megatron.layers.compiled_attention import blocks

_LONGEST = 512
"""Positions up to which batched products are the faster backward."""


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
    seq_length = q_basd.shape[2]
    if q_basd.device.type == "cpu" and dropout == 0.0:
        if compiled_attention.serves(q_basd, seq_length):
            return compiled_attention.separate_attention(q_basd, k_bgsd, v_bgsd)
        if seq_length <= _LONGEST:
            return _ShortCausalAttention.apply(q_basd, k_bgsd, v_bgsd)
    return _fused(q_basd, k_bgsd, v_bgsd, dropout)


def causal_self_attention(qkv_bsgcd: Tensor, *, dropout: float) -> Tensor:
    """``causal_attention`` of what one projection makes: nothing between the two.

    Args:
        qkv_bsgcd: [b, s, g, r + 2, d]: of every group its queries, its key and its value.
        dropout: as in ``causal_attention``.

    Returns:
        [b, s, a d].
    """
    if dropout == 0.0 and compiled_attention.serves(qkv_bsgcd, qkv_bsgcd.shape[1]):
        return compiled_attention.fused_attention(qkv_bsgcd)
    heads = (t.transpose(1, 2) for t in split_heads(qkv_bsgcd))
    return causal_attention(*heads, dropout=dropout).transpose(1, 2).flatten(2)


def split_heads(qkv_bsgcd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [b, s, a, d], keys and values [b, s, g, d]; views wherever strides allow."""
    # one split, so that the backward writes the fused gradient once instead of adding parts
    q, k, v = qkv_bsgcd.split([qkv_bsgcd.shape[3] - 2, 1, 1], dim=3)
    return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)


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
    """PyTorch's forward; backward one block of queries after the other."""

    @staticmethod
    def forward(ctx: Any, q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor) -> Tensor:
        ctx.save_for_backward(q_basd, k_bgsd, v_bgsd)
        return _fused(q_basd, k_bgsd, v_bgsd, dropout=0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_basd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_basd, k_bgsd, v_bgsd = ctx.saved_tensors
        groups = k_bgsd.shape[1]
        k_xsd, v_xsd = (t.flatten(0, 1) for t in (k_bgsd, v_bgsd))
        dq_basd = grad_basd.new_empty(grad_basd.shape)
        dk_xsd, dv_xsd = torch.zeros_like(k_xsd), torch.zeros_like(v_xsd)
        for start, end in blocks(grad_basd.shape[2]):
            q_xqd, grad_xqd = (_dense(t, groups, (start, end)) for t in (q_basd, grad_basd))
            k_xkd, v_xkd = (t[:, :end].contiguous() for t in (k_xsd, v_xsd))
            dq_xqd, dk_xkd, dv_xkd = _backward(q_xqd, k_xkd, v_xkd, grad_xqd, end - start)
            dq_block = dq_basd[:, :, start:end]
            dq_block.copy_(dq_xqd.view(dq_block.shape))
            dk_xsd[:, :end].add_(dk_xkd)
            dv_xsd[:, :end].add_(dv_xkd)
        return dq_basd, dk_xsd.unflatten(0, (-1, groups)), dv_xsd.unflatten(0, (-1, groups))


def _dense(t_basd: Tensor, groups: int, block: tuple[int, int]) -> Tensor:
    """The positions of a block as [x, q, d]: of every group one query head after the other."""
    start, end = block
    t_xrqd = t_basd[:, :, start:end].unflatten(1, (groups, -1)).flatten(0, 1)
    return t_xrqd.flatten(1, 2).contiguous()


def _backward(
    q_xqd: Tensor, k_xkd: Tensor, v_xkd: Tensor, grad_xqd: Tensor, queries: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What the queries of one block give to the gradients of queries, keys and values."""
    scale = q_xqd.shape[-1] ** -0.5
    score_xqk = (q_xqd @ k_xkd.mT).mul_(scale)
    prob_xqk = torch.softmax(_hide_future(score_xqk, queries), dim=-1)
    dprob_xqk = grad_xqd @ v_xkd.mT
    dscore_xqk = torch._softmax_backward_data(dprob_xqk, prob_xqk, -1, prob_xqk.dtype).mul_(scale)
    return dscore_xqk @ k_xkd, dscore_xqk.mT @ q_xqd, prob_xqk.mT @ grad_xqd


def _hide_future(score_xqk: Tensor, queries: int) -> Tensor:
    """Make the scores of keys after their query minus infinity, in place."""
    future = torch.full((queries, queries), -torch.inf, dtype=score_xqk.dtype).triu_(1)
    score_xqk.unflatten(1, (-1, queries))[..., -queries:] += future
    return score_xqk
