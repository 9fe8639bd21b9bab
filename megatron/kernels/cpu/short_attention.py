"""Causal attention over short sequences on a CPU: a backward by batched products.

PyTorch's fused kernel works in tiles that are too small for the matrix units of a core. Batched
products are faster in the backward. They also round less: the gradients of a row's scores sum to
zero.

Shapes: b batch, a query heads, g key/value heads, r = a / g, s sequence, d channels of a head,
x = b g; q queries of a block times r, k keys up to the end of that block.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.kernels.autograd import once_differentiable
from megatron.kernels.cpu.compiled_attention import blocks
from megatron.kernels.reference.kernels import scaled_dot_product

LONGEST = 512
"""Longest sequence for which batched products make the faster backward."""


class ShortCausalAttention(torch.autograd.Function):
    """PyTorch's forward, and a backward that takes one block of queries after the other."""

    @staticmethod
    def forward(ctx: Any, q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor) -> Tensor:
        """See ``Kernels.causal_attention``."""
        ctx.save_for_backward(q_basd, k_bgsd, v_bgsd)
        return scaled_dot_product(q_basd, k_bgsd, v_bgsd, dropout=0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_basd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values."""
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
    """Return a block's positions as [x, q, d]: the query heads of a group follow one another."""
    start, end = block
    t_xrqd: Tensor = t_basd[:, :, start:end].unflatten(1, (groups, -1)).flatten(0, 1)
    return t_xrqd.flatten(1, 2).contiguous()


def _backward(
    q_xqd: Tensor, k_xkd: Tensor, v_xkd: Tensor, grad_xqd: Tensor, queries: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of a block's queries, and its part of the keys' and values' gradients."""
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
