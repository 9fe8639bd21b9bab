"""Hunyuan (dense): queries and keys are normalised after they are rotated."""

import math
from typing import Final

from megatron.checkpoint.foreign.family import (
    Values,
    attention_biases,
    llama_like,
    written_biases,
)
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.llama import NORMS, common_fields, written_fields
from megatron.checkpoint.foreign.rotation import LARGEST_BASE, read_base, scaling_of
from megatron.flags.ranges import THETA
from megatron.model.settings import ModelSettings

_EPSILON: Final = 1e-5


def _read(c: Fields) -> Values:
    c.check("use_qk_norm", (True,), True)
    c.check("use_cla", (False,), False)
    given = {"rms_norm_eps": _EPSILON} | dict(c.all)
    scaling = scaling_of(c)
    if scaling is not None and _is_stretched(scaling):
        given |= {"rope_parameters": {"rope_theta": _stretched(c, scaling)}, "rope_scaling": None}
    common = common_fields(Fields(given, c.origin))
    return (
        common | attention_biases(c) | {"qk_layernorm": True, "qk_layernorm_after_rotation": True}
    )


def _is_stretched(scaling: Fields) -> bool:
    """Return whether a dynamic scaling has an ``alpha``, which makes it a larger theta."""
    kind = scaling.any("rope_type", scaling.any("type", "default"))
    return kind == "dynamic" and bool(scaling.any("alpha", 0))


def _stretched(c: Fields, scaling: Fields) -> float:
    """Return the theta whose lowest frequency is divided by ``alpha``."""
    theta = scaling if "rope_theta" in scaling else c
    hidden, heads = c.whole("hidden_size"), c.whole("num_attention_heads")
    width = c.whole("head_dim", max(hidden // heads, 1))
    if width < 4:
        raise c.fault("head_dim", "more than 2, as alpha scales some pairs and not others")
    alpha = scaling.positive("alpha")
    base = read_base(theta, "rope_theta", 10000)
    stretched = base * alpha ** (width / (width - 2)) if alpha < LARGEST_BASE else math.inf
    if not THETA.contains(stretched):
        raise scaling.fault(
            "alpha", f"one that makes a theta from 1 to {LARGEST_BASE:.0f} of {base:g}"
        )
    return stretched


def _write(model: ModelSettings) -> Values:
    bias = written_biases(model)["attention_bias"]
    return written_fields(model) | {"attention_bias": bias}


_QK_NORMS: Final = {
    "self_attention.q_layernorm": "self_attn.query_layernorm",
    "self_attention.k_layernorm": "self_attn.key_layernorm",
}

HUNYUAN: Final = llama_like("hunyuan_v1_dense", "HunYuanDenseV1", NORMS | _QK_NORMS, _read, _write)
