"""Causal attention: PyTorch's fused kernels, and a faster one for short sequences on a CPU.

PyTorch's CPU kernel works in tiles too small for the matrix units of the core. As long as the
scores of a block of queries stay near the core, batched matrix products with a softmax between them
do better: in bf16, where ours is fused, in both directions, otherwise in the backward, where they
also round less (the gradients of a row's scores sum to zero). The backward recomputes the
probabilities, so that nothing quadratic in s outlives a pass.

Shapes: b batch, a query heads, g key/value heads, r = a / g, s sequence, d channels of a head,
x = b g; q queries of a block times r, k keys up to the end of that block.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megatron.layers.cpu_library import expect, library_for

# bf16, 8 heads of 64 channels, one core of a Zen 5, forward and backward in ms, PyTorch / ours:
# s = 128: 2.9 / 0.9, s = 512: 20 / 6.6, s = 1024: 50 / 22. Blocks of 128 and of 512 are no faster.
# Ours allocates: where the C library returns freed memory to the system, page faults eat the gain.
_LONGEST_COMPILED = 1024
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
    longest = _LONGEST if library_for(q_basd) is None else _LONGEST_COMPILED
    if q_basd.device.type == "cpu" and dropout == 0.0 and q_basd.shape[2] <= longest:
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
    """One block of queries after the other, each against the keys up to its end."""

    @staticmethod
    def forward(ctx: Any, q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor) -> Tensor:
        # batched products want dense matrices: small copies save as many strided ones
        q_xrsd = _by_group(q_basd, k_bgsd.shape[1])
        k_xsd, v_xsd = (t.flatten(0, 1).contiguous() for t in (k_bgsd, v_bgsd))
        if library_for(q_basd) is None:
            ctx.save_for_backward(q_xrsd, k_xsd, v_xsd)
            return _fused(q_basd, k_bgsd, v_bgsd, dropout=0.0)
        batch, heads, seq_length, size = q_basd.shape
        out_basd = q_basd.new_empty(batch, seq_length, heads, size).transpose(1, 2)
        log_sums = []
        for start, end in _blocks(seq_length):
            prob_xqk = q_xrsd[:, :, start:end].flatten(1, 2) @ k_xsd[:, :end].mT
            log_sums.append(_softmax(prob_xqk, end - start, size**-0.5))
            out_block = out_basd[:, :, start:end]
            out_block.copy_((prob_xqk @ v_xsd[:, :end]).view(out_block.shape))
        ctx.save_for_backward(q_xrsd, k_xsd, v_xsd, *log_sums)
        return out_basd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_basd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_xrsd, k_xsd, v_xsd, *log_sums = ctx.saved_tensors
        log_sums = log_sums or [None] * len(_blocks(q_xrsd.shape[2]))
        groups = len(k_xsd) // len(grad_basd)
        grad_xrsd = _by_group(grad_basd, groups)
        dq_xrsd, dk_xsd, dv_xsd = _backward(q_xrsd, k_xsd, v_xsd, log_sums, grad_xrsd)
        dk_bgsd, dv_bgsd = (t.unflatten(0, (-1, groups)) for t in (dk_xsd, dv_xsd))
        return dq_xrsd.view(grad_basd.shape), dk_bgsd, dv_bgsd


def _by_group(t_basd: Tensor, groups: int) -> Tensor:
    """[x, r, s, d], dense."""
    return t_basd.unflatten(1, (groups, -1)).flatten(0, 1).contiguous()


def _blocks(seq_length: int) -> list[tuple[int, int]]:
    """First position of every block, and the one after its last."""
    return [(i, min(i + _BLOCK, seq_length)) for i in range(0, seq_length, _BLOCK)]


def _backward(
    q_xrsd: Tensor,
    k_xsd: Tensor,
    v_xsd: Tensor,
    log_sums: Sequence[Tensor | None],
    grad_xrsd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, in the layouts given."""
    heads, seq_length, size = q_xrsd.shape[1:]
    dq_xrsd, dk_xsd, dv_xsd = (torch.empty_like(t) for t in (q_xrsd, k_xsd, v_xsd))
    # from the last block, which sees all keys: it writes dk and dv, the others add to them
    for (start, end), log_sum_xq in zip(_blocks(seq_length)[::-1], log_sums[::-1], strict=True):
        q_xqd, grad_xqd = (t[:, :, start:end].flatten(1, 2) for t in (q_xrsd, grad_xrsd))
        k_xkd, v_xkd = k_xsd[:, :end], v_xsd[:, :end]
        prob_xqk, dscore_xqk = q_xqd @ k_xkd.mT, grad_xqd @ v_xkd.mT
        _softmax_backward(prob_xqk, dscore_xqk, log_sum_xq, end - start, size**-0.5)
        dv_xkd, dk_xkd = prob_xqk.mT @ grad_xqd, dscore_xqk.mT @ q_xqd
        dq_xrsd[:, :, start:end] = (dscore_xqk @ k_xkd).unflatten(1, (heads, -1))
        if end == seq_length:
            dk_xsd, dv_xsd = dk_xkd, dv_xkd
        else:
            dk_xsd[:, :end] += dk_xkd
            dv_xsd[:, :end] += dv_xkd
    return dq_xrsd, dk_xsd, dv_xsd


def _softmax(score_xqk: Tensor, queries: int, scale: float) -> Tensor:
    """Turn products of queries and keys into probabilities, in place.

    Args:
        score_xqk: bf16; the last ``queries`` keys are those of the block's own positions.
        queries: positions of the block.
        scale: of the products.

    Returns:
        [x, q], fp32: the logarithm of each row's sum of exponentials.
    """
    library = library_for(score_xqk)
    assert library is not None
    expect(torch.bfloat16, score_xqk)
    log_sum_xq = score_xqk.new_empty(score_xqk.shape[:-1], dtype=torch.float32)
    rows, keys = log_sum_xq.numel(), score_xqk.shape[-1]
    library.causal_softmax_bf16(
        score_xqk.data_ptr(), rows, queries, keys, scale, log_sum_xq.data_ptr()
    )
    return log_sum_xq


def _softmax_backward(
    score_xqk: Tensor, dprob_xqk: Tensor, log_sum_xq: Tensor | None, queries: int, scale: float
) -> None:
    """Turn products into probabilities, their gradients into those of the products, in place."""
    library = library_for(score_xqk)
    if log_sum_xq is None or library is None:
        prob_xqk = torch.softmax(_hide_future(score_xqk.mul_(scale), queries), dim=-1)
        dscore_xqk = torch._softmax_backward_data(dprob_xqk, prob_xqk, -1, prob_xqk.dtype)
        score_xqk.copy_(prob_xqk)
        torch.mul(dscore_xqk, scale, out=dprob_xqk)
        return
    expect(torch.bfloat16, score_xqk, dprob_xqk)
    expect(torch.float32, log_sum_xq)
    rows, keys = log_sum_xq.numel(), score_xqk.shape[-1]
    pointers = (t.data_ptr() for t in (score_xqk, dprob_xqk, log_sum_xq))
    library.causal_softmax_backward_bf16(*pointers, rows, queries, keys, scale)


def _hide_future(score_xqk: Tensor, queries: int) -> Tensor:
    """Make the scores of keys after their query minus infinity, in place."""
    future = torch.full((queries, queries), -torch.inf, dtype=score_xqk.dtype).triu_(1)
    score_xqk.unflatten(1, (-1, queries))[..., -queries:] += future
    return score_xqk
