"""OLMo 2 and 3: no norms before attention and MLP but behind both, norms over all heads.

In OLMo 3 three of four layers have a window. Their rotation is not scaled.
"""

from typing import Final

from megatron.checkpoint.foreign.family import (
    QK_NORMS,
    Values,
    attention_biases,
    layer_types,
    llama_like,
    sizes,
    windows,
    written_biases,
    written_sizes,
    written_window,
)
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.rotation import (
    read_rotation,
    read_two_rotations,
    write_rotation,
)
from megatron.model.settings import ModelSettings

_BASE: Final = 500_000
"""RoPE theta of OLMo 3 where a file tells none."""

_WINDOW: Final = 4096
"""The window that a file of OLMo 3 tells of even if no layer has it."""


def _common(c: Fields) -> Values:
    c.check("hidden_act", ("silu", "swish"), "silu")
    given = Fields({"rms_norm_eps": 1e-5} | dict(c.all), c.origin)
    return (
        sizes(given)
        | attention_biases(c)
        | {
            "activation": "swiglu",
            "tie_embeddings": c.truth("tie_word_embeddings", False),
            "pre_layernorm": False,
            "post_self_attn_layernorm": True,
            "post_mlp_layernorm": True,
            "qk_layernorm": True,
            "qk_layernorm_across_heads": True,
        }
    )


def _written(model: ModelSettings) -> Values:
    bias = written_biases(model)["attention_bias"]
    return written_sizes(model) | {"hidden_act": "silu", "attention_bias": bias}


def _read_2(c: Fields) -> Values:
    return _common(c) | read_rotation(c)


def _write_2(model: ModelSettings) -> Values:
    return _written(model) | write_rotation(model)


def _read_3(c: Fields) -> Values:
    common = _common(c)
    local = [int((layer + 1) % 4 != 0) for layer in range(common["num_layers"])]
    rotation, base = read_two_rotations(c, _BASE, lambda: _BASE)
    size = c.whole_or_none("sliding_window", _WINDOW)
    return common | rotation | windows(c, size, local, base)


def _write_3(model: ModelSettings) -> Values:
    local = model.positions.rotary_base_local
    older = write_rotation(model)
    far: Values = {"rope_type": "default", **older.pop("rope_scaling", {}), **older}
    near = {"rope_type": "default", "rope_theta": float(local or model.positions.rotary_base)}
    return _written(model) | {
        "sliding_window": written_window(model) or _WINDOW,
        "layer_types": layer_types(model),
        "rope_parameters": {"full_attention": far, "sliding_attention": near},
    }


_NORMS: Final = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
} | QK_NORMS

OLMO2: Final = llama_like("olmo2", "Olmo2", _NORMS, _read_2, _write_2)
OLMO3: Final = llama_like("olmo3", "Olmo3", _NORMS, _read_3, _write_3)
