"""Attention within documents by CUDA's flash kernel for sequences of unequal length.

The documents of all samples lie one behind the other, and the kernel treats each document as a
sample. So the work grows with the squares of the documents' lengths, not of the sample's length.

Shapes: b batch, a query heads, g key/value heads, s sequence, d channels of a head, n = b s.
"""

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Final

import torch
from torch import Tensor

from megatron.kernels.attention_options import AttentionOptions

_WIDEST_HEAD, _CHANNELS_AT_ONCE = 256, 8
LEAST_CAPABILITY = (8, 0)
"""The least compute capability of a GPU that PyTorch's flash attention runs on."""

_COMPUTED: Final = frozenset({"window", "documents"})
"""The properties of ``AttentionOptions`` that the kernel computes."""


def can_pack(q_basd: Tensor, options: AttentionOptions) -> bool:
    """Whether this PyTorch and this GPU have the kernel, and the kernel computes this attention."""
    return (
        q_basd.is_cuda
        and knows_packed(q_basd, options)
        and torch.cuda.get_device_capability(q_basd.device) >= LEAST_CAPABILITY
        and _kernel() is not None
    )


def knows_packed(q_basd: Tensor, options: AttentionOptions) -> bool:
    """Whether the kernel, if it is here, computes this attention."""
    return options.asked <= _COMPUTED and knows_heads(q_basd)


def knows_heads(q_basd: Tensor) -> bool:
    """Whether PyTorch's flash attention takes heads of this type and size."""
    return (
        q_basd.dtype in (torch.bfloat16, torch.float16)
        and q_basd.shape[3] <= _WIDEST_HEAD
        and q_basd.shape[3] % _CHANNELS_AT_ONCE == 0
    )


@cache
def _kernel() -> Callable[..., object] | None:
    """Return PyTorch's function; ``None`` before 2.10, or if it lacks scale, window or groups."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # here, since it takes seconds to import
    except ImportError:
        return None
    asked = {"scale", "window_size", "enable_gqa"}
    return varlen_attn if asked <= signature(varlen_attn).parameters.keys() else None


def packed_attention(
    q_basd: Tensor, k_bgsd: Tensor, v_bgsd: Tensor, options: AttentionOptions
) -> Tensor:
    """See ``Kernels.causal_attention``."""
    varlen_attn, documents, scores = _kernel(), options.documents, options.scores
    assert varlen_attn is not None, "can_pack says whether it is there"
    assert documents is not None, "samples without documents have quicker kernels"
    q_nad, k_ngd, v_ngd = (t.transpose(1, 2).flatten(0, 1) for t in (q_basd, k_bgsd, v_bgsd))
    out_nad = varlen_attn(
        q_nad,
        k_ngd,
        v_ngd,
        documents.bounds_k,
        documents.bounds_k,
        documents.longest,
        documents.longest,
        scale=scores.scale_of(q_basd.shape[3]),
        window_size=(-1 if scores.window is None else scores.window, 0),
        enable_gqa=q_basd.shape[1] != k_bgsd.shape[1],
    )
    assert isinstance(out_nad, Tensor)  # without statistics beside it
    out_bsad: Tensor = out_nad.unflatten(0, (len(q_basd), -1))
    return out_bsad.transpose(1, 2)
