"""The operations of the kernels as textbooks write them; for float64, with autograd."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megatron.kernels.scores import PLAIN, Scores


def explicit_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def explicit_exact_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def explicit_relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x))


def explicit_squared_relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x * x, torch.zeros_like(x))


def explicit_swiglu(gate_up: Tensor) -> Tensor:
    size = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :size], gate_up[..., size:]
    return gate / (1 + torch.exp(-gate)) * up


def explicit_geglu(gate_up: Tensor) -> Tensor:
    size = gate_up.shape[-1] // 2
    return explicit_gelu(gate_up[..., :size]) * gate_up[..., size:]


def explicit_quick_geglu(gate_up: Tensor, limit: float | None, offset: float) -> Tensor:
    size = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :size], gate_up[..., size:]
    if limit is not None:
        gate = torch.where(gate > limit, limit, gate)
        up = torch.where(up.abs() > limit, limit * up.sign(), up)
    return gate / (1 + torch.exp(-1.702 * gate)) * (up + offset)


def explicit_layer_norm(x: Tensor, weight_h: Tensor, bias_h: Tensor, epsilon: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    deviation = (centred.square().mean(-1, keepdim=True) + epsilon).sqrt()
    return centred / deviation * weight_h + bias_h


def explicit_rms_norm(x: Tensor, weight_h: Tensor, epsilon: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight_h


def explicit_rotation(x: Tensor, angle: Tensor, *, interleaved: bool) -> Tensor:
    """[b, s, a, d] with angles [b or 1, s, 1, p], as products of complex numbers."""
    pairs, rotated = angle.shape[-1], 2 * angle.shape[-1]
    turned, rest = x[..., :rotated], x[..., rotated:]
    shape = (pairs, 2) if interleaved else (2, pairs)
    two = turned.unflatten(-1, shape).movedim(-1 if interleaved else -2, -1)
    number = torch.view_as_complex(two.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    back = torch.view_as_real(number).movedim(-1, -1 if interleaved else -2)
    return torch.cat((back.flatten(-2), rest), -1)


def explicit_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scores: Scores = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """[b, heads, s, d] with [b, groups, s, d], one head at a time; a sink is one more column."""
    share, positions = q.shape[1] // k.shape[1], torch.arange(q.shape[2], device=q.device)
    behind = positions[:, None] - positions
    far = behind > (len(positions) if scores.window is None else scores.window)
    heads = []
    for head in range(q.shape[1]):
        key, value = k[:, head // share], v[:, head // share]
        score = torch.einsum("bid,bjd->bij", q[:, head], key)
        score = score / math.sqrt(q.shape[-1]) if scores.scale is None else score * scores.scale
        if scores.softcap:
            score = scores.softcap * torch.tanh(score / scores.softcap)
        if scores.slopes_a:
            score = score - scores.slopes_a[head] * behind.to(score.dtype)
        score = score.masked_fill((behind < 0) | far, -math.inf)
        if sinks is not None:
            score = torch.cat((score, sinks[head].expand(*score.shape[:-1], 1)), -1)
        heads.append(score.softmax(-1)[..., : len(positions)] @ value)
    return torch.stack(heads, dim=1)


def explicit_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    starts: Sequence[Sequence[int]],
    scores: Scores = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """``explicit_attention`` of every document by itself; ``starts`` are those of each sample."""
    samples = []
    for sample, begins in enumerate(starts):
        documents = [
            explicit_attention(
                *(t[sample : sample + 1, :, begin:end] for t in (q, k, v)),
                scores=scores,
                sinks=sinks,
            )
            for begin, end in pairwise([*begins, q.shape[2]])
        ]
        samples.append(torch.cat(documents, dim=2))
    return torch.cat(samples)


def first_positions(starts: Sequence[Sequence[int]], seq: int) -> Tensor:
    """For every position the last of the starts up to it, [b, s]."""
    rows = [[max(b for b in begins if b <= i) for i in range(seq)] for begins in starts]
    return torch.tensor(rows)


def explicit_self_attention(qkv: Tensor, *, scores: Scores = PLAIN) -> Tensor:
    """[b, s, groups, r + 2, d] -> [b, s, heads d]."""
    q = qkv[:, :, :, :-2].flatten(2, 3)
    heads = (t.transpose(1, 2) for t in (q, qkv[:, :, :, -2], qkv[:, :, :, -1]))
    return explicit_attention(*heads, scores=scores).transpose(1, 2).flatten(2)
