"""Attention of queries to a part of the keys they see, so that parts can be put together.

A part is softmax(scores of the part) v, with the logarithm of the sum of the scores' exponentials.
The parts of a query add up to its attention to all keys, each with the weight exp(logarithm of the
part - logarithm of the whole). If the backward of a part is given the output and the logarithm of
the *whole*, it returns this part's summands of the gradients. This is how ring attention (arXiv
2310.01889) and flash attention (2205.14135, algorithm 4) work.

``MULTIPLIED`` is the specification. The others call PyTorch's flash attention.

Shapes: b batch, a query heads, g key/value heads, r = a / g, s positions of queries, z positions of
keys, d channels of a head.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from megatron.kernels.softmax import statistics_dtype

Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of queries, keys and values."""

_aten = torch.ops.aten


class PartialAttention(NamedTuple):
    """Kernels for a part of attention.

    Attributes:
        forward: (queries [b, a, s, d], keys [b, g, z, d], values, is_causal, scale) -> output
            [b, a, s, d] and logarithms [b, a, s], which are statistics. ``is_causal``: s = z, and a
            query sees the keys up to its own position; otherwise it sees all keys.
        backward: (gradient of the whole's output, queries, keys, values, the whole's output, the
            whole's logarithms, is_causal, scale) -> the part's summands of the gradients.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients]


def _multiply(
    q_basd: Tensor, k_bgzd: Tensor, v_bgzd: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    score_bgrsz = _scores(q_basd, k_bgzd, is_causal, scale)
    log_bgrs = score_bgrsz.logsumexp(-1)
    prob_bgrsz = (score_bgrsz - log_bgrs.unsqueeze(-1)).exp()
    out_bgrsd: Tensor = prob_bgrsz.to(v_bgzd.dtype) @ v_bgzd.unsqueeze(2)
    return out_bgrsd.flatten(1, 2), log_bgrs.flatten(1, 2)


def _multiply_back(
    grad_basd: Tensor,
    q_basd: Tensor,
    k_bgzd: Tensor,
    v_bgzd: Tensor,
    out_basd: Tensor,
    log_bas: Tensor,
    is_causal: bool,
    scale: float,
) -> Gradients:
    groups, dtype = k_bgzd.shape[1], q_basd.dtype
    score_bgrsz = _scores(q_basd, k_bgzd, is_causal, scale)
    prob_bgrsz = (score_bgrsz - log_bas.unflatten(1, (groups, -1)).unsqueeze(-1)).exp()
    grad_bgrsd, q_bgrsd = (t.unflatten(1, (groups, -1)) for t in (grad_basd, q_basd))
    v_grad = (prob_bgrsz.to(dtype).mT @ grad_bgrsd).sum(2)
    wide = prob_bgrsz.dtype
    along_bas1 = (grad_basd.to(wide) * out_basd.to(wide)).sum(-1, keepdim=True)
    prob_grad = (grad_bgrsd @ v_bgzd.unsqueeze(2).mT).to(wide)
    score_grad = prob_bgrsz * (prob_grad - along_bas1.unflatten(1, (groups, -1))) * scale
    score_grad = score_grad.to(dtype)
    q_grad = (score_grad @ k_bgzd.unsqueeze(2)).flatten(1, 2)
    k_grad = (score_grad.mT @ q_bgrsd).sum(2)
    return q_grad, k_grad, v_grad


def _scores(q_basd: Tensor, k_bgzd: Tensor, is_causal: bool, scale: float) -> Tensor:
    q_bgrsd = q_basd.unflatten(1, (k_bgzd.shape[1], -1))
    product_bgrsz: Tensor = q_bgrsd @ k_bgzd.unsqueeze(2).mT
    score_bgrsz = product_bgrsz.to(statistics_dtype(q_basd.dtype)) * scale
    if is_causal:
        hidden_sz = torch.ones(score_bgrsz.shape[-2:], dtype=torch.bool, device=q_basd.device)
        score_bgrsz.masked_fill_(hidden_sz.triu(1), -torch.inf)
    return score_bgrsz


def _on_host(
    q_basd: Tensor, k_bgzd: Tensor, v_bgzd: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    made: tuple[Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu(
        q_basd, k_bgzd, v_bgzd, 0.0, is_causal, scale=scale
    )
    return made


def _back_on_host(
    grad_basd: Tensor,
    q_basd: Tensor,
    k_bgzd: Tensor,
    v_bgzd: Tensor,
    out_basd: Tensor,
    log_bas: Tensor,
    is_causal: bool,
    scale: float,
) -> Gradients:
    made: Gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_basd, q_basd, k_bgzd, v_bgzd, out_basd, log_bas, 0.0, is_causal, scale=scale
    )
    return made


def _on_gpu(
    q_basd: Tensor, k_bgzd: Tensor, v_bgzd: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out_basd, log_bas, *_ = _aten._scaled_dot_product_flash_attention(
        q_basd, k_bgzd, v_bgzd, 0.0, is_causal, scale=scale
    )
    return out_basd, log_bas


def _back_on_gpu(
    grad_basd: Tensor,
    q_basd: Tensor,
    k_bgzd: Tensor,
    v_bgzd: Tensor,
    out_basd: Tensor,
    log_bas: Tensor,
    is_causal: bool,
    scale: float,
) -> Gradients:
    log_bas = log_bas.contiguous()  # PyTorch's kernel reads it as if it were, unasked
    unused: Any = torch.empty(2, dtype=torch.uint64, device=q_basd.device)  # seed of no dropout
    made: Gradients = _aten._scaled_dot_product_flash_attention_backward(
        grad_basd,
        q_basd,
        k_bgzd,
        v_bgzd,
        out_basd,
        log_bas,
        None,
        None,
        q_basd.shape[2],
        k_bgzd.shape[2],
        0.0,
        is_causal,
        unused,
        unused,
        scale=scale,
    )
    return made


MULTIPLIED: Final = PartialAttention(_multiply, _multiply_back)
"""Plain products, for any type and device; a matrix [s, z] for every head is in memory."""

HOST_FLASH: Final = PartialAttention(_on_host, _back_on_host)
"""PyTorch's flash attention of CPUs, for any type."""

GPU_FLASH: Final = PartialAttention(_on_gpu, _back_on_gpu)
"""PyTorch's flash attention of CUDA, for bf16 and fp16, and heads of at most 256 channels, a
multiple of 8."""


def partial_attention(q_basd: Tensor) -> PartialAttention:
    """Return the quickest kernels for queries of this device, type and size."""
    if q_basd.device.type == "cpu":
        return HOST_FLASH
    narrow = q_basd.dtype in (torch.bfloat16, torch.float16)
    channels = q_basd.shape[-1]
    return GPU_FLASH if narrow and channels % 8 == 0 and channels <= 256 else MULTIPLIED
