"""Causal attention in bf16 on a CPU: batched products around a softmax compiled from C++.

Each block of queries is multiplied by the keys up to the block's end, so that the scores of a block
stay in a near cache. The probabilities are kept for the backward; to form them again would take 3
of 50 ms for four layers of 512 positions. With 8 heads they take 3 MB per layer and microbatch in
flight, and 10 MB with 1024 positions. This adds 40 % and 65 % to the memory that a layer of 512
channels keeps. A product copies every operand that is not dense, so operands of several products
are gathered once. Between the products there are as few PyTorch calls as possible: a view that
autograd follows costs as much as a small kernel.

Shapes: b batch, g key/value heads, r query heads for each, s sequence, d channels of a head,
c = r + 2, x = b g; q queries of a block times r, k keys up to the end of that block.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.kernels.autograd import apply, once_differentiable
from megatron.kernels.cpu.library import Library, expect

# bf16, 8 heads of 64 channels, one core of a Zen 5, forward and backward in ms, PyTorch / ours:
# s = 128: 2.6 / 0.6, s = 512: 19 / 4.4, s = 1024: 46 / 15; longer sequences keep too many
# probabilities. Blocks of 128 and of 512 positions are no faster.
# Ours allocates memory for the probabilities. If the C library returns freed memory to the system,
# page faults cost more time than our attention saves.
LONGEST = 1024
BLOCK = 256


def blocks(seq_length: int) -> list[tuple[int, int]]:
    """Return the first position of every block, and the position after its last."""
    return [(i, min(i + BLOCK, seq_length)) for i in range(0, seq_length, BLOCK)]


def separate_attention(q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, library: Library) -> Tensor:
    """Queries [b, g r, s, d], keys and values [b, g, s, d] -> [b, g r, s, d], laid out as bsad."""
    return apply(_SeparateAttention, q_basd, k_bgsd, v_bgsd, library)


def fused_attention(qkv_bsgcd: Tensor, library: Library) -> Tensor:
    """[b, s, g, c, d], for every group its queries, its key and its value -> [b, s, g r d]."""
    return apply(_FusedAttention, qkv_bsgcd, library)


class _SeparateAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, library: Library
    ) -> Tensor:
        batch, heads, seq_length, size = q_basd.shape
        out_basd = q_basd.new_empty(batch, seq_length, heads, size).transpose(1, 2)
        groups = k_bgsd.shape[1]
        parts = (_by_group(t, groups) for t in (q_basd, k_bgsd, v_bgsd, out_basd))
        ctx.library = library
        ctx.save_for_backward(*_forward(library, *parts))
        return out_basd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_basd: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        batch, _, seq_length, size = grad_basd.shape
        saved = ctx.saved_tensors  # read once: each read may compute again
        groups = len(saved[0]) // batch
        dq_basd = grad_basd.new_empty(grad_basd.shape)
        dk_bgsd, dv_bgsd = grad_basd.new_empty(2, batch, groups, seq_length, size)
        parts = (_by_group(t, groups) for t in (grad_basd, dq_basd, dk_bgsd, dv_bgsd))
        _backward(ctx.library, saved, *parts)
        return dq_basd, dk_bgsd, dv_bgsd, None


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_bsgcd: Tensor, library: Library) -> Tensor:
        batch, seq_length, groups, parts, size = qkv_bsgcd.shape
        out_bsgrd = qkv_bsgcd.new_empty(batch, seq_length, groups, parts - 2, size)
        out_bgrsd = out_bsgrd.permute(0, 2, 3, 1, 4)
        ctx.library = library
        ctx.save_for_backward(*_forward(library, *_parts(qkv_bsgcd), out_bgrsd))
        return out_bsgrd.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_bsf: Tensor) -> tuple[Tensor, None]:
        batch, seq_length, _ = grad_bsf.shape
        saved = ctx.saved_tensors
        k_xsd = saved[0]
        groups, size = len(k_xsd) // batch, k_xsd.shape[-1]
        grad_bsgrd = grad_bsf.reshape(batch, seq_length, groups, -1, size)
        queries = grad_bsgrd.shape[3]
        dqkv_bsgcd = grad_bsf.new_empty(batch, seq_length, groups, queries + 2, size)
        grad_bgrsd = grad_bsgrd.permute(0, 2, 3, 1, 4)
        _backward(ctx.library, saved, grad_bgrsd, *_parts(dqkv_bsgcd))
        return dqkv_bsgcd, None


def _by_group(t_basd: Tensor, groups: int) -> Tensor:
    """[b, g r, s, d] as [b, g, r, s, d]."""
    batch, heads, seq_length, size = t_basd.shape
    return t_basd.view(batch, groups, heads // groups, seq_length, size)


def _parts(qkv_bsgcd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [b, g, r, s, d], keys and values [b, g, 1, s, d], all as views."""
    qkv_bgcsd = qkv_bsgcd.permute(0, 2, 3, 1, 4)
    queries = qkv_bgcsd.shape[2] - 2
    return (
        qkv_bgcsd.narrow(2, 0, queries),
        qkv_bgcsd.narrow(2, queries, 1),
        qkv_bgcsd.narrow(2, queries + 1, 1),
    )


def _forward(
    library: Library, q_bgrsd: Tensor, k_bg1sd: Tensor, v_bg1sd: Tensor, out_bgrsd: Tensor
) -> list[Tensor]:
    """Write the output; return keys, values and each block's tensors for the backward."""
    k_xsd, v_xsd = _gathered(library, k_bg1sd), _gathered(library, v_bg1sd)
    saved = [k_xsd, v_xsd]
    for start, end in blocks(q_bgrsd.shape[3]):
        q_xqd = _gathered(library, q_bgrsd.narrow(3, start, end - start))
        prob_xqk = torch.bmm(q_xqd, _up_to(k_xsd, end).mT)
        _softmax(library, prob_xqk, end - start, q_xqd.shape[2] ** -0.5)
        context_xqd = torch.bmm(prob_xqk, _up_to(v_xsd, end))
        _scatter(library, context_xqd, out_bgrsd.narrow(3, start, end - start))
        saved += [q_xqd, prob_xqk]
    return saved


def _backward(
    library: Library,
    saved: tuple[Tensor, ...],
    grad_bgrsd: Tensor,
    dq_bgrsd: Tensor,
    dk_bg1sd: Tensor,
    dv_bg1sd: Tensor,
) -> None:
    """Write the gradients of queries, keys and values."""
    k_xsd, v_xsd, *of_blocks = saved
    dk_xsd = dv_xsd = torch.empty(0)
    # The last block comes first: it sees all keys and makes dk and dv; the others add to them.
    for start, end in reversed(blocks(k_xsd.shape[1])):
        prob_xqk, q_xqd = of_blocks.pop(), of_blocks.pop()
        grad_xqd = _gathered(library, grad_bgrsd.narrow(3, start, end - start))
        k_xkd = _up_to(k_xsd, end)
        dscore_xqk = torch.bmm(grad_xqd, _up_to(v_xsd, end).mT)
        _softmax_backward(library, prob_xqk, dscore_xqk, end - start, q_xqd.shape[2] ** -0.5)
        _scatter(library, torch.bmm(dscore_xqk, k_xkd), dq_bgrsd.narrow(3, start, end - start))
        dk_xkd, dv_xkd = torch.bmm(dscore_xqk.mT, q_xqd), torch.bmm(prob_xqk.mT, grad_xqd)
        if end == k_xsd.shape[1]:
            dk_xsd, dv_xsd = dk_xkd, dv_xkd
        else:
            dk_xsd.narrow(1, 0, end).add_(dk_xkd)
            dv_xsd.narrow(1, 0, end).add_(dv_xkd)
    _scatter(library, dk_xsd, dk_bg1sd)
    _scatter(library, dv_xsd, dv_bg1sd)


def _up_to(t_xsd: Tensor, end: int) -> Tensor:
    """The positions before ``end``, dense."""
    return t_xsd if end == t_xsd.shape[1] else t_xsd.narrow(1, 0, end).contiguous()


def _gathered(library: Library, t_bgrsd: Tensor) -> Tensor:
    """[b, g, r, s, d] with any strides as a dense [x, r s, d]."""
    batch, groups, heads, seq_length, size = t_bgrsd.shape
    dense_bgrsd = t_bgrsd.new_empty(t_bgrsd.shape)
    _copy(library, t_bgrsd if t_bgrsd.stride(4) == 1 else t_bgrsd.contiguous(), dense_bgrsd)
    return dense_bgrsd.view(batch * groups, heads * seq_length, size)


def _scatter(library: Library, t_xqd: Tensor, out_bgrsd: Tensor) -> None:
    """Write a dense [x, r s, d] to [b, g, r, s, d] with any strides."""
    _copy(library, t_xqd.view(out_bgrsd.shape), out_bgrsd)


def _copy(library: Library, source_bgrsd: Tensor, target_bgrsd: Tensor) -> None:
    """Copy between any layouts whose channels lie together."""
    for t_bgrsd in (source_bgrsd, target_bgrsd):
        assert t_bgrsd.dtype == torch.bfloat16
        assert t_bgrsd.stride(4) == 1 or t_bgrsd.shape[4] == 1
    library.copy_rows_bf16(
        source_bgrsd.data_ptr(),
        *source_bgrsd.stride()[:4],
        target_bgrsd.data_ptr(),
        *target_bgrsd.stride()[:4],
        *source_bgrsd.shape,
    )


def _softmax(library: Library, score_xqk: Tensor, queries: int, scale: float) -> None:
    """Turn products of queries and keys into probabilities, in place.

    Args:
        library: compiled from ``cpu_kernels.cpp``.
        score_xqk: products; the last ``queries`` keys belong to the block's own positions.
        queries: positions of the block.
        scale: factor of the products.
    """
    expect(torch.bfloat16, score_xqk)
    heads, rows, keys = score_xqk.shape
    library.causal_softmax_bf16(score_xqk.data_ptr(), heads * rows, queries, keys, scale)


def _softmax_backward(
    library: Library, prob_xqk: Tensor, dprob_xqk: Tensor, queries: int, scale: float
) -> None:
    """Turn the gradient of the probabilities into the gradient of the products, in place."""
    expect(torch.bfloat16, prob_xqk, dprob_xqk)
    heads, rows, keys = prob_xqk.shape
    library.causal_softmax_backward_bf16(
        prob_xqk.data_ptr(), dprob_xqk.data_ptr(), heads * rows, queries, keys, scale
    )
