"""Attention of queries to a part of the keys they see, so that parts can be put together.

A part is softmax(scores of the part) v, with the logarithm of the sum of the scores' exponentials.
The parts of a query add up to its attention to all keys, each with the weight exp(logarithm of the
part - logarithm of the whole). If the backward of a part is given the output and the logarithm of
the *whole*, it returns this part's summands of the gradients. This is how ring attention (arXiv
2310.01889) and flash attention (2205.14135, algorithm 4) work.

``multiplied`` is the specification, ``flash`` calls PyTorch's flash attention of CUDA, which knows
no ``PartView``.

Shapes: b batch, a query heads, g key/value heads, r = a / g, s positions of queries, z positions of
keys, d channels of a head.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.kernels.reference.scored_attention import slopes_on
from megatron.kernels.scores import Scores
from megatron.kernels.softmax import statistics_dtype

Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of queries, keys and values."""

_WIDEST_HEAD, _CHANNELS_AT_ONCE = 256, 8

_aten = torch.ops.aten


class PartView(NamedTuple):
    """The facts, besides products, that decide how a part's queries see its keys.

    Attributes:
        first_query: position of the first query in its sample; the others follow it.
        first_key: position of the first key.
        scores: how products become scores; the part itself says the scale.
        first_bs: for every query the first position of its document, on the device; ``None``:
            samples are not divided.
    """

    first_query: int
    first_key: int
    scores: Scores
    first_bs: Tensor | None = None


class AttentionPart(NamedTuple):
    """Queries, and the part of the keys and values that they attend to.

    Attributes:
        q_basd: queries.
        k_bgzd: keys.
        v_bgzd: values.
        is_causal: s = z, and a query sees the keys up to its own position; otherwise it sees all
            keys.
        scale: factor of the products of queries and keys.
        view: cap, window, slopes and documents; with it, positions decide which keys a query sees.
            ``None``: there are none of these.
    """

    q_basd: Tensor
    k_bgzd: Tensor
    v_bgzd: Tensor
    is_causal: bool
    scale: float
    view: PartView | None = None


class Attended(NamedTuple):
    """The result of attention to a part of the keys, or to all.

    Attributes:
        out_basd: the output.
        log_bas: for every query the logarithm of the sum of its scores' exponentials; statistics.
            A query that sees no key has -inf, and an output of 0.
    """

    out_basd: Tensor
    log_bas: Tensor


def join_parts_(whole: Attended, part: Attended) -> None:
    """See ``Kernels``."""
    # out = Σ exp(log_k - log) out_k with log = log Σ exp(log_k) (arXiv 2310.01889); the factors
    # need the old logarithm, so it is replaced last.
    sum_bas = torch.logaddexp(whole.log_bas, part.log_bas)
    whole.out_basd.mul_((whole.log_bas - sum_bas).exp().unsqueeze(-1))
    whole.out_basd.add_((part.log_bas - sum_bas).exp().unsqueeze(-1) * part.out_basd)
    whole.log_bas.copy_(sum_bas)


def multiplied(part: AttentionPart) -> Attended:
    """Return attention to a part by plain products; every head has a matrix [s, z] in memory."""
    (score_bgrsz, _), v_bgzd = _scores(part), part.v_bgzd
    log_bgrs = score_bgrsz.logsumexp(-1)
    finite_bgrs = log_bgrs
    if part.view is not None:  # else every query sees a key
        # Without this, a query that sees no key here would form -inf - -inf = NaN.
        finite_bgrs = log_bgrs.masked_fill(log_bgrs == -torch.inf, 0.0)
    prob_bgrsz = (score_bgrsz - finite_bgrs.unsqueeze(-1)).exp()
    out_bgrsd: Tensor = prob_bgrsz.to(v_bgzd.dtype) @ v_bgzd.unsqueeze(2)
    return Attended(out_bgrsd.flatten(1, 2), log_bgrs.flatten(1, 2))


def multiplied_gradients(part: AttentionPart, whole: Attended, grad_basd: Tensor) -> Gradients:
    """Return a part's summands of the gradients, by plain products."""
    q_basd, k_bgzd, v_bgzd, scale = part.q_basd, part.k_bgzd, part.v_bgzd, part.scale
    groups, dtype = k_bgzd.shape[1], q_basd.dtype
    log_bgrs = whole.log_bas.unflatten(1, (groups, -1))
    score_bgrsz, slope_bgrsz = _scores(part)
    prob_bgrsz = (score_bgrsz - log_bgrs.unsqueeze(-1)).exp()
    grad_bgrsd, q_bgrsd = (t.unflatten(1, (groups, -1)) for t in (grad_basd, q_basd))
    v_grad = (prob_bgrsz.to(dtype).mT @ grad_bgrsd).sum(2)
    wide = prob_bgrsz.dtype
    # Σ P ∇P over *all* keys, from the whole output: ∇O · O (2205.14135, algorithm 4). So a part
    # needs no sum over the other parts.
    along_bas1 = (grad_basd.to(wide) * whole.out_basd.to(wide)).sum(-1, keepdim=True)
    prob_grad = (grad_bgrsd @ v_bgzd.unsqueeze(2).mT).to(wide)
    score_grad = prob_bgrsz * (prob_grad - along_bas1.unflatten(1, (groups, -1))) * scale
    if slope_bgrsz is not None:
        score_grad *= slope_bgrsz
    score_grad = score_grad.to(dtype)
    q_grad = (score_grad @ k_bgzd.unsqueeze(2)).flatten(1, 2)
    k_grad = (score_grad.mT @ q_bgrsd).sum(2)
    return q_grad, k_grad, v_grad


def _scores(part: AttentionPart) -> tuple[Tensor, Tensor | None]:
    """Return the scores, and their derivatives by the scaled products; ``None``: these are 1."""
    q_bgrsd = part.q_basd.unflatten(1, (part.k_bgzd.shape[1], -1))
    product_bgrsz: Tensor = q_bgrsd @ part.k_bgzd.unsqueeze(2).mT
    score_bgrsz = product_bgrsz.to(statistics_dtype(part.q_basd.dtype)) * part.scale
    if part.view is not None:
        return _viewed(score_bgrsz, part.view)
    if part.is_causal:
        shape = score_bgrsz.shape[-2:]
        hidden_sz = torch.ones(shape, dtype=torch.bool, device=score_bgrsz.device).triu(1)
        score_bgrsz.masked_fill_(hidden_sz, -torch.inf)
    return score_bgrsz, None


def _viewed(score_bgrsz: Tensor, view: PartView) -> tuple[Tensor, Tensor | None]:
    """Cap, bias and hide scaled products; return the scores, and the derivatives of the cap."""
    slope_bgrsz, device, cap = None, score_bgrsz.device, view.scores.softcap
    queries, keys = score_bgrsz.shape[-2:]
    if cap:
        tanh_bgrsz = score_bgrsz.div_(cap).tanh_()
        score_bgrsz = tanh_bgrsz * cap
        slope_bgrsz = tanh_bgrsz.square_().neg_().add_(1)
    keys_z = torch.arange(view.first_key, view.first_key + keys, device=device)
    own_s1 = torch.arange(view.first_query, view.first_query + queries, device=device)[:, None]
    behind_sz = own_s1 - keys_z
    if view.scores.slopes_a:
        slopes_a = slopes_on(view.scores.slopes_a, device, score_bgrsz.dtype)
        slopes_gr11 = slopes_a.view(score_bgrsz.shape[1], -1, 1, 1)
        score_bgrsz = torch.addcmul(
            score_bgrsz, slopes_gr11, behind_sz.to(score_bgrsz.dtype), value=-1
        )
    hidden = behind_sz < 0
    if view.scores.window is not None:
        hidden |= behind_sz > view.scores.window
    if view.first_bs is not None:
        hidden = (hidden | (keys_z < view.first_bs.unsqueeze(-1)))[:, None, None]
    return score_bgrsz.masked_fill_(hidden, -torch.inf), slope_bgrsz


def knows_flash(part: AttentionPart) -> bool:
    """Return whether PyTorch's flash attention of CUDA takes such a part, wherever it is."""
    channels, dtype = part.q_basd.shape[-1], part.q_basd.dtype
    is_plain = part.view is None and dtype in (torch.bfloat16, torch.float16)
    return is_plain and channels <= _WIDEST_HEAD and channels % _CHANNELS_AT_ONCE == 0


def flash(part: AttentionPart) -> Attended:
    """Return attention to a part by PyTorch's flash attention of CUDA."""
    q_basd, k_bgzd, v_bgzd, is_causal, scale, _ = part
    out_basd, log_bas, *_ = _aten._scaled_dot_product_flash_attention(
        q_basd, k_bgzd, v_bgzd, 0.0, is_causal, scale=scale
    )
    return Attended(out_basd, log_bas)


def flash_gradients(part: AttentionPart, whole: Attended, grad_basd: Tensor) -> Gradients:
    """Return a part's summands of the gradients, by PyTorch's flash attention of CUDA."""
    q_basd, k_bgzd, v_bgzd, is_causal, scale, _ = part
    log_bas = whole.log_bas.contiguous()  # PyTorch's kernel reads a strided one wrongly, unasked
    unused: Any = torch.empty(2, dtype=torch.uint64, device=q_basd.device)  # seed of no dropout
    made: Gradients = _aten._scaled_dot_product_flash_attention_backward(
        grad_basd,
        q_basd,
        k_bgzd,
        v_bgzd,
        whole.out_basd,
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
