"""Causal attention for ranks that share every sequence and pass keys and values on along a ring.

In step 0 the queries of a rank attend to the rank's own keys, in step i to the keys of the rank i
places before. While a step computes, the keys and values of the next step travel. A rank has an
early and a late chunk of the sequence (``parallel.context``). In steps of lower ranks all queries
see the other's early chunk and none of its late one. In steps of higher ranks only late queries see
anything, and they see both chunks. So all steps but the first have the same work, and no step but
the first needs a mask. The parts of the softmax are put together by their logarithms of sums
(arXiv 2310.01889).

The backward goes around once more. Gradients of keys and values travel with them, and the last hop
brings the gradients home.

Shapes: b batch, u tokens of a rank, a query heads, g key/value heads, d channels of a head; 2: keys
and values.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.kernels.autograd import apply, once_differentiable
from megatron.kernels.face import Kernels
from megatron.kernels.reference.partial_attention import Attended, AttentionPart
from megatron.kernels.sinks import sinks_gradient, with_sinks
from megatron.kernels.softmax import statistics_dtype
from megatron.parallel.context import ContextParallel


def ring_attention(
    kernels: Kernels,
    context: ContextParallel,
    q_buad: Tensor,
    k_bugd: Tensor,
    v_bugd: Tensor,
    scale: float,
    sinks_a: Tensor | None = None,
) -> Tensor:
    """Return causal attention of this rank's queries to all keys, [b, u, a, d].

    Args:
        kernels: compute attention to a part of the keys.
        context: the ranks that share the sequences.
        q_buad: queries of this rank's tokens, rotated by the tokens' true positions.
        k_bugd: keys of this rank's tokens, rotated in the same way.
        v_bugd: values of this rank's tokens.
        scale: factor of the products of queries and keys.
        sinks_a: see ``Kernels.causal_attention``.
    """
    own_2bgud = torch.stack((k_bugd.transpose(1, 2), v_bugd.transpose(1, 2)))
    given = q_buad.transpose(1, 2), own_2bgud, sinks_a, kernels, context, scale
    return apply(_RingAttention, *given).transpose(1, 2)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_baud: Tensor,
        own_2bgud: Tensor,
        sinks_a: Tensor | None,
        kernels: Kernels,
        context: ContextParallel,
        scale: float,
    ) -> Tensor:
        wide = statistics_dtype(q_baud.dtype)
        coming = context.pass_on(own_2bgud)
        own = _part(q_baud, own_2bgud, scale, is_causal=True)
        first_baud, log_bau = kernels.attend_to_part(own)
        out_baud = first_baud.to(wide)
        for step in range(1, context.size):
            seen_2bgud = coming.wait()
            if step + 1 < context.size:
                coming = context.pass_on(seen_2bgud)
            queries, keys = _seeing(context, step, q_baud.shape[2])
            part = _part(q_baud[:, :, queries], seen_2bgud[..., keys, :], scale)
            whole = Attended(out_baud[:, :, queries], log_bau[:, :, queries])
            _put_together(whole, kernels.attend_to_part(part))
        if sinks_a is not None:
            out_baud, log_bau = with_sinks(out_baud, log_bau, sinks_a)
        narrow_baud = out_baud.to(q_baud.dtype)
        ctx.save_for_backward(q_baud, own_2bgud, narrow_baud, log_bau, sinks_a)
        ctx.kernels, ctx.context, ctx.scale = kernels, context, scale
        return narrow_baud

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_baud: Tensor) -> tuple[Tensor | None, ...]:
        q_baud, own_2bgud, out_baud, log_bau, sinks_a = ctx.saved_tensors
        kernels, context, scale = ctx.kernels, ctx.context, ctx.scale
        wide = statistics_dtype(q_baud.dtype)
        coming = context.pass_on(own_2bgud)
        own, whole = _part(q_baud, own_2bgud, scale, is_causal=True), Attended(out_baud, log_bau)
        first, *both = kernels.gradients_of_part(own, whole, grad_baud)
        q_grad_baud, sum_2bgud = first.to(wide), torch.stack(both)
        for step in range(1, context.size):
            seen_2bgud = coming.wait()
            coming_sum = context.pass_on(sum_2bgud)
            if step + 1 < context.size:
                coming = context.pass_on(seen_2bgud)
            queries, keys = _seeing(context, step, q_baud.shape[2])
            part = _part(q_baud[:, :, queries], seen_2bgud[..., keys, :], scale)
            whole = Attended(out_baud[:, :, queries], log_bau[:, :, queries])
            more, *both = kernels.gradients_of_part(part, whole, grad_baud[:, :, queries])
            q_grad_baud[:, :, queries] += more
            sum_2bgud = coming_sum.wait()
            sum_2bgud[..., keys, :] += torch.stack(both)
        kv_grad_2bgud = context.pass_on(sum_2bgud).wait()
        sinks_grad_a = None
        if sinks_a is not None:
            sinks_grad_a = sinks_gradient(grad_baud, out_baud, log_bau, sinks_a)
        return q_grad_baud.to(q_baud.dtype), kv_grad_2bgud, sinks_grad_a, None, None, None


def _seeing(context: ContextParallel, step: int, tokens: int) -> tuple[slice, slice]:
    """Return the queries of this rank that see keys in a step after the first, and those keys."""
    chunk = tokens // 2
    if step <= context.rank:  # the keys are of the lower rank ``rank - step``
        return slice(0, tokens), slice(0, chunk)
    return slice(chunk, tokens), slice(0, tokens)


def _part(
    q_baud: Tensor, keys_2bgud: Tensor, scale: float, *, is_causal: bool = False
) -> AttentionPart:
    k_bgud, v_bgud = keys_2bgud.unbind()
    return AttentionPart(q_baud, k_bgud, v_bgud, is_causal, scale)


def _put_together(whole: Attended, part: Attended) -> None:
    """Add a part of the softmax to the parts that ``whole`` has already, in place."""
    sum_bau = torch.logaddexp(whole.log_bas, part.log_bas)
    whole.out_basd.mul_((whole.log_bas - sum_bau).exp().unsqueeze(-1))
    whole.out_basd.add_((part.log_bas - sum_bau).exp().unsqueeze(-1) * part.out_basd)
    whole.log_bas.copy_(sum_bau)
