"""GLM 4 (dense) and GLM-4.5 (mixture): a share of each head turns, biases of queries, keys, values.

The dense models turn neighbouring channels together. ``glm4`` has norms behind attention and MLP,
``glm`` has none. The mixture has DeepSeek-V3's experts and depths, and norms of queries and keys in
its larger models.
"""

from typing import Final

from megatron.checkpoint.foreign.deepseek import (
    V3_EXPERTS,
    read_biased_choice,
    read_depths,
    read_experts,
    read_groups,
    written_experts,
)
from megatron.checkpoint.foreign.family import (
    QK_NORMS,
    Values,
    llama_like,
    sizes,
    written_sizes,
)
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.layouts import Same, Table
from megatron.checkpoint.foreign.llama import NORMS
from megatron.checkpoint.foreign.rotation import read_rotation, write_rotation
from megatron.model.ownership import LAYERS
from megatron.model.settings import ModelSettings

_SHARE: Final = 0.5
_EPSILON: Final = 1.5625e-7


def _common(c: Fields, *, bias: bool) -> Values:
    c.check("hidden_act", ("silu", "swish"), "silu")
    return {
        "activation": "swiglu",
        "tie_embeddings": c.truth("tie_word_embeddings", False),
        "add_qkv_bias": c.truth("attention_bias", bias),
    } | read_rotation(c, share=_SHARE)


def _written(model: ModelSettings) -> Values:
    return (
        written_sizes(model)
        | write_rotation(model)
        | {
            "hidden_act": "silu",
            "partial_rotary_factor": model.positions.rotary_percent,
            "attention_bias": model.attention.add_qkv_bias,
            "pad_token_id": None,  # by default a token that smaller vocabularies lack
        }
    )


def _read_dense(c: Fields) -> Values:
    given = Fields({"rms_norm_eps": _EPSILON, "head_dim": 128} | dict(c.all), c.origin)
    common = _common(given, bias=True)
    return sizes(given, groups=2) | common | {"rotary_interleaved": True}


def _read_4(c: Fields) -> Values:
    return _read_dense(c) | {"post_self_attn_layernorm": True, "post_mlp_layernorm": True}


def _read_moe(c: Fields) -> Values:
    given = Fields({"rms_norm_eps": 1e-5, "first_k_dense_replace": 1} | dict(c.all), c.origin)
    found = sizes(given, groups=8) | _common(given, bias=False)
    found |= read_experts(given, found["num_layers"]) | read_biased_choice(c)
    found |= {"qk_layernorm": c.truth("use_qk_norm", False), "mtp_num_layers": read_depths(c)}
    return found | read_groups(c, found, best=2, groups=1, chosen=1)


def _write_moe(model: ModelSettings) -> Values:
    return (
        _written(model)
        | written_experts(model)
        | {
            "use_qk_norm": model.attention.qk_layernorm,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": model.further.mtp_num_layers,
        }
    )


_GATE_AND_UP: Final[Table] = {
    f"{LAYERS}mlp.linear_fc1.weight": Same("model.layers.{}.mlp.gate_up_proj.weight")
}
_BEHIND: Final = {
    "post_self_attn_layernorm": "post_self_attn_layernorm",
    "post_mlp_layernorm": "post_mlp_layernorm",
}

GLM: Final = llama_like("glm", "Glm", NORMS, _read_dense, _written, more=_GATE_AND_UP)
GLM4: Final = llama_like("glm4", "Glm4", NORMS | _BEHIND, _read_4, _written, more=_GATE_AND_UP)
GLM4_MOE: Final = llama_like(
    "glm4_moe",
    "Glm4Moe",
    NORMS | QK_NORMS,
    _read_moe,
    _write_moe,
    more=V3_EXPERTS,
    aliases={
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
)
