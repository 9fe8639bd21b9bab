"""Causal attention: PyTorch's fused kernels, and a faster one for short sequences on a CPU.

PyTorch's CPU kernel works in tiles too small for the matrix units of the core. As long as the
scores of a block of queries stay near the core, batched matrix products with a softmax between them
do better: in bf16, where ours is fused, in both directions, otherwise in the backward, where they
also round less (the gradients of a row's scores sum to zero). The backward recomputes the
probabilities, so that nothing quadratic in s outlives a pass.

Shapes: b batch, a query heads, g key/value heads, r = a / g, s sequence, d channels of a head,
x = b g; q queries of a block times r, k keys up to the end of that block.
"""

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
        # batched products copy what is not dense, each of them anew: better once, beforehand
        blocks, groups = _blocks(q_basd.shape[2]), k_bgsd.shape[1]
        q_blocks = [_dense(q_basd, groups, block) for block in blocks]
        k_xsd, v_xsd = (t.flatten(0, 1).contiguous() for t in (k_bgsd, v_bgsd))
        if library_for(q_basd) is None:
            ctx.save_for_backward(k_xsd, v_xsd, *q_blocks)
            return _fused(q_basd, k_bgsd, v_bgsd, dropout=0.0)
        batch, heads, seq_length, size = q_basd.shape
        out_basd = q_basd.new_empty(batch, seq_length, heads, size).transpose(1, 2)
        log_sums = []
        for (start, end), q_xqd in zip(blocks, q_blocks, strict=True):
            prob_xqk = q_xqd @ k_xsd[:, :end].mT
            log_sums.append(_softmax(prob_xqk, end - start, size**-0.5))
            out_block = out_basd[:, :, start:end]
            out_block.copy_((prob_xqk @ v_xsd[:, :end]).view(out_block.shape))
        ctx.save_for_backward(k_xsd, v_xsd, *q_blocks, *log_sums)
        return out_basd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_basd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k_xsd, v_xsd, *of_blocks = ctx.saved_tensors
        blocks, groups = _blocks(grad_basd.shape[2]), len(k_xsd) // len(grad_basd)
        q_blocks, log_sums = of_blocks[: len(blocks)], of_blocks[len(blocks) :]
        dq_basd = grad_basd.new_empty(grad_basd.shape)
        dk_xsd = dv_xsd = None
        # from the last block, which sees all keys: it writes dk and dv, the others add to them
        for i, (start, end) in reversed(list(enumerate(blocks))):
            grad_xqd = _dense(grad_basd, groups, (start, end))
            k_xkd, v_xkd = (t[:, :end].contiguous() for t in (k_xsd, v_xsd))
            log_sum_xq = log_sums[i] if log_sums else None
            dq_xqd, dk_xkd, dv_xkd = _backward(
                q_blocks[i], k_xkd, v_xkd, log_sum_xq, grad_xqd, end - start
            )
            dq_block = dq_basd[:, :, start:end]
            dq_block.copy_(dq_xqd.view(dq_block.shape))
            if dk_xsd is None or dv_xsd is None:
                dk_xsd, dv_xsd = dk_xkd, dv_xkd
            else:
                dk_xsd[:, :end] += dk_xkd
                dv_xsd[:, :end] += dv_xkd
        assert dk_xsd is not None
        assert dv_xsd is not None
        return dq_basd, dk_xsd.unflatten(0, (-1, groups)), dv_xsd.unflatten(0, (-1, groups))


def _dense(t_basd: Tensor, groups: int, block: tuple[int, int]) -> Tensor:
    """The positions of a block as [x, q, d]: of every group one query head after the other."""
    start, end = block
    t_xrqd = t_basd[:, :, start:end].unflatten(1, (groups, -1)).flatten(0, 1)
    return t_xrqd.flatten(1, 2).contiguous()


def _blocks(seq_length: int) -> list[tuple[int, int]]:
    """First position of every block, and the one after its last."""
    return [(i, min(i + _BLOCK, seq_length)) for i in range(0, seq_length, _BLOCK)]


def _backward(
    q_xqd: Tensor,
    k_xkd: Tensor,
    v_xkd: Tensor,
    log_sum_xq: Tensor | None,
    grad_xqd: Tensor,
    queries: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the queries of one block give to the gradients of queries, keys and values."""
    prob_xqk, dscore_xqk = q_xqd @ k_xkd.mT, grad_xqd @ v_xkd.mT
    _softmax_backward(prob_xqk, dscore_xqk, log_sum_xq, queries, q_xqd.shape[-1] ** -0.5)
    return dscore_xqk @ k_xkd, dscore_xqk.mT @ q_xqd, prob_xqk.mT @ grad_xqd


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
