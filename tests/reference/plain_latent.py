"""Multi-latent attention as its paper has it (arXiv 2405.04434, section 2.1), head by head.

Shapes: b batch, s sequence, h hidden, n plain channels of a head, r turned ones, e of a value.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from reference import plain_rotation

Norm = Callable[[str, torch.Tensor], torch.Tensor]
"""Normalises a tensor by the parameters under a name."""


class Latent(plain_rotation.Rotation, Protocol):
    """The options that are read; see ``GPTOptions``."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def q_lora_rank(self) -> int | None: ...
    @property
    def kv_lora_rank(self) -> int: ...
    @property
    def qk_head_dim(self) -> int: ...
    @property
    def qk_pos_emb_head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...
    @property
    def qk_layernorm(self) -> bool: ...
    @property
    def softmax_scale(self) -> float | None: ...


def shapes(o: Latent) -> dict[str, tuple[bool, tuple[int, ...]]]:
    """Of every part of the attention: whether it is there, and the shape of its weight."""
    h, a, n, r, e = (
        o.hidden_size,
        o.num_attention_heads,
        o.qk_head_dim,
        o.qk_pos_emb_head_dim,
        o.v_head_dim,
    )
    narrow, latent = o.q_lora_rank or h, o.kv_lora_rank
    has_rank = o.q_lora_rank is not None
    return {
        "linear_q_proj": (not has_rank, (a * (n + r), h)),
        "linear_q_down_proj": (has_rank, (narrow, h)),
        "q_layernorm": (has_rank and o.qk_layernorm, (narrow,)),
        "linear_q_up_proj": (has_rank, (a * (n + r), narrow)),
        "linear_kv_down_proj": (True, (latent + r, h)),
        "kv_layernorm": (o.qk_layernorm, (latent,)),
        "linear_kv_up_proj": (True, (a * (n + e), latent)),
        "linear_proj": (True, (h, a * e)),
    }


def attention(
    parameters: dict[str, torch.Tensor], name: str, x_bsh: torch.Tensor, o: Latent, norm: Norm
) -> torch.Tensor:
    """Its output [b, s, h]."""
    n, r, length = o.qk_head_dim, o.qk_pos_emb_head_dim, x_bsh.shape[1]

    def times(part: str, x: torch.Tensor) -> torch.Tensor:
        return _linear(parameters, f"{name}.{part}", x)

    def normed(part: str, x: torch.Tensor) -> torch.Tensor:
        return norm(f"{name}.{part}", x) if o.qk_layernorm else x

    if o.q_lora_rank is None:
        queries = times("linear_q_proj", x_bsh)
    else:
        queries = times(
            "linear_q_up_proj", normed("q_layernorm", times("linear_q_down_proj", x_bsh))
        )
    down = times("linear_kv_down_proj", x_bsh)
    latent, shared = down[..., : o.kv_lora_rank], down[..., o.kv_lora_rank :]
    keys_values = times("linear_kv_up_proj", normed("kv_layernorm", latent))
    longer = 1 + o.mscale_all_dim * math.log(o.rotary_scaling_factor) / 10
    scale = o.softmax_scale or longer**2 / math.sqrt(n + r)
    later_ss = torch.ones(length, length, dtype=torch.bool).triu(1)
    found = []
    for q_bsd, kv_bsf in zip(
        queries.split(n + r, -1), keys_values.split(n + o.v_head_dim, -1), strict=True
    ):
        products_bst = q_bsd[..., :n] @ kv_bsf[..., :n].mT
        products_bst = products_bst + _turned(q_bsd[..., n:], o) @ _turned(shared, o).mT
        shares_bst = (scale * products_bst).masked_fill(later_ss, -math.inf).softmax(-1)
        found.append(shares_bst @ kv_bsf[..., n:])
    return times("linear_proj", torch.cat(found, -1))


def _linear(parameters: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    product, bias = x @ parameters[f"{name}.weight"].T, parameters.get(f"{name}.bias")
    return product if bias is None else product + bias


def _turned(x_bsr: torch.Tensor, o: Latent) -> torch.Tensor:
    """Channels 2i and 2i + 1 as a complex number, times exp(i angle)."""
    half, seq = x_bsr.shape[-1] // 2, x_bsr.shape[1]
    frequencies = plain_rotation.frequencies(o, half, seq, windowed=False)
    angles = torch.outer(torch.arange(seq, dtype=torch.float64), frequencies)
    length = plain_rotation.length(o, windowed=False)
    turns = torch.polar(torch.full_like(angles, length), angles)
    pairs = torch.view_as_complex(x_bsr.double().unflatten(-1, (half, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2).to(x_bsr.dtype)
