"""Attention in windows and with sinks by PyTorch's flash attention.

``scaled_dot_product_attention`` has no windows, but the operators below it do. They know no sinks,
which come after them (``kernels.sinks``). The last query is at the last key, if there are fewer
queries than keys.

Shapes: b batch, a query heads, g key/value heads, s sequence, d channels of a head, n = b s.
"""

from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from megatron.kernels.attention_options import AttentionOptions
from megatron.kernels.autograd import apply, once_differentiable
from megatron.kernels.reference.packed_attention import LEAST_CAPABILITY, knows_heads
from megatron.kernels.sinks import sinks_gradient, with_sinks

_aten = torch.ops.aten

_COMPUTED: Final = frozenset({"window", "documents", "sinks_a"})
"""The properties of ``AttentionOptions`` that are computed here."""


def can_window(q_basd: Tensor, k_bgsd: Tensor, options: AttentionOptions) -> bool:
    """Whether the GPU has the kernel, and the kernel computes this attention."""
    return (
        q_basd.is_cuda
        and knows_window(q_basd, k_bgsd, options)
        and torch.cuda.get_device_capability(q_basd.device) >= LEAST_CAPABILITY
    )


def knows_window(q_basd: Tensor, k_bgsd: Tensor, options: AttentionOptions) -> bool:
    """Whether the kernel, if it is here, computes this attention."""
    documents = options.documents
    fits = documents is None or documents.are_of(q_basd, k_bgsd)
    return fits and options.asked <= _COMPUTED and knows_heads(q_basd)


def windowed_attention(
    q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, attention: AttentionOptions
) -> Tensor:
    """See ``Kernels.causal_attention``."""
    scores, documents, sinks_a = attention.scores, attention.documents, attention.sinks_a
    heads = [t.transpose(1, 2) for t in (q_basd, k_bgsd, v_bgsd)]
    options = {
        "scale": scores.scale_of(q_basd.shape[3]),
        "window_size_left": -1 if scores.window is None else scores.window,
        "window_size_right": 0,
    }
    bounds: _Bounds
    if documents is None:
        bounds = None, None, q_basd.shape[2], k_bgsd.shape[2]
        return apply(_WindowedAttention, *heads, sinks_a, bounds, options).transpose(1, 2)
    packed = [t.flatten(0, 1) for t in heads]
    bounds = documents.bounds_k, documents.bounds_k, documents.longest, documents.longest
    out_nad = apply(_WindowedAttention, *packed, sinks_a, bounds, options)
    out_bsad: Tensor = out_nad.unflatten(0, (len(q_basd), -1))
    return out_bsad.transpose(1, 2)


_Bounds: TypeAlias = tuple[Tensor | None, Tensor | None, int, int]
"""Where documents begin, for queries and for keys, and the longest of each."""


class _WindowedAttention(torch.autograd.Function):
    """Attention of heads [b, s, a, d], or of packed documents [n, a, d]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_a: Tensor | None,
        bounds: "_Bounds",
        options: dict[str, Any],
    ) -> Tensor:
        out, lse, seed, offset, _ = _aten._flash_attention_forward(
            q, k, v, *bounds, 0.0, True, False, **options
        )
        if sinks_a is not None:
            by_head, lse = with_sinks(out.transpose(-3, -2), lse, sinks_a)
            out = by_head.transpose(-3, -2)
        # Without dropout nothing reads seed and offset.
        ctx.save_for_backward(q, k, v, out, lse, sinks_a, seed, offset)
        ctx.bounds, ctx.options = bounds, options
        made: Tensor = out
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks_a, *dropout_state = ctx.saved_tensors
        grad = grad.contiguous()
        gradients = _aten._flash_attention_backward(
            grad, q, k, v, out, lse, *ctx.bounds, 0.0, True, *dropout_state, **ctx.options
        )
        sinks_grad_a = None
        if sinks_a is not None:
            by_head = grad.transpose(-3, -2), out.transpose(-3, -2)
            sinks_grad_a = sinks_gradient(*by_head, lse, sinks_a)
        return *gradients, sinks_grad_a, None, None
