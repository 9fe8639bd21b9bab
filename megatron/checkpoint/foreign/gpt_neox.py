"""GPT-NeoX and Pythia: attention and MLP read norms of the same input, a share of a head turns."""

from typing import Final

from megatron.checkpoint.foreign.derived import is_causal_mask, is_rotation, is_score_of_hidden
from megatron.checkpoint.foreign.family import Family, Values, sizes, written_sizes
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.layouts import Same, Table
from megatron.checkpoint.foreign.llama import check_head_width
from megatron.checkpoint.foreign.plain_layers import named, read_function, written_function
from megatron.checkpoint.foreign.rotation import read_rotation, write_rotation
from megatron.model.ownership import FINAL_NORM, LAYERS, OUTPUT_LAYER, WORD_EMBEDDINGS
from megatron.model.settings import ModelSettings

_SHARE: Final = 0.25
_OWN: Final = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
"""Names of other families for fields of this one."""


def _read(c: Fields) -> Values:
    check_head_width(c, "GPT-NeoX")
    c.check("attention_bias", (True,), True)
    given = dict(c.all)
    for name, other in _OWN.items():
        c.check(other, (None, c.any(name, None)), None)  # transformers reads past it
        if c.is_null(name):
            raise c.fault(name, "a number")
        given.pop(other, None)
        if name in given:
            given[other] = given.pop(name)
    is_parallel = c.truth("use_parallel_residual", True)
    return (
        sizes(Fields(given | {"num_key_value_heads": None}, c.origin))
        | read_rotation(Fields(given, c.origin), share=_SHARE)
        | read_function(c, "hidden_act", "gelu")
        | {
            "normalization": "LayerNorm",
            "norm_epsilon": c.positive("layer_norm_eps", 1e-5),
            "hidden_dropout": c.share("hidden_dropout", 0.0),
            "add_bias_linear": True,
            "tie_embeddings": c.truth("tie_word_embeddings", False),
            "parallel_attn": is_parallel,
            "parallel_layernorm": is_parallel,
        }
    )


def _write(model: ModelSettings) -> Values:
    written = written_sizes(model) | write_rotation(model)
    for name in ("num_key_value_heads", "rms_norm_eps"):
        del written[name]
    return written | {
        "rotary_emb_base": written.pop("rope_theta"),
        "rotary_pct": model.positions.rotary_percent,
        "hidden_act": written_function(model),
        "layer_norm_eps": model.norm.norm_epsilon,
        "hidden_dropout": model.block.hidden_dropout,
        "use_parallel_residual": model.block.parallel_attn,
    }


_LAYER: Final = "gpt_neox.layers.{}"
_TABLE: Final[Table] = {
    WORD_EMBEDDINGS: Same("gpt_neox.embed_in.weight"),
    OUTPUT_LAYER: Same("embed_out.weight"),
    **named(
        {
            f"{LAYERS}input_layernorm": f"{_LAYER}.input_layernorm",
            f"{LAYERS}self_attention.linear_qkv": f"{_LAYER}.attention.query_key_value",
            f"{LAYERS}self_attention.linear_proj": f"{_LAYER}.attention.dense",
            f"{LAYERS}pre_mlp_layernorm": f"{_LAYER}.post_attention_layernorm",
            f"{LAYERS}mlp.linear_fc1": f"{_LAYER}.mlp.dense_h_to_4h",
            f"{LAYERS}mlp.linear_fc2": f"{_LAYER}.mlp.dense_4h_to_h",
            FINAL_NORM: "gpt_neox.final_layer_norm",
        }
    ),
}

GPT_NEOX: Final = Family(
    "gpt_neox",
    "gpt_neox",
    "GPTNeoXForCausalLM",
    "gpt_neox.",
    _TABLE,
    _read,
    _write,
    tables={
        ".attention.bias": is_causal_mask,
        ".attention.masked_bias": is_score_of_hidden,
        ".rotary_emb.inv_freq": is_rotation,
    },
)
