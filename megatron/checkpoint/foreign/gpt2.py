"""GPT-2: learned positions, LayerNorm, biases; its matrices are stored as [inputs, outputs]."""

from typing import Any, Final

from megatron.checkpoint.foreign.derived import is_causal_mask, is_score_of_hidden
from megatron.checkpoint.foreign.family import Family
from megatron.checkpoint.foreign.fields import MOST_LAYERS, Fields
from megatron.checkpoint.foreign.layouts import (
    ForeignError,
    Heads,
    InOne,
    Layout,
    Same,
    Table,
    Transposed,
)
from megatron.checkpoint.foreign.plain_layers import read_function, written_function
from megatron.model.ownership import (
    FINAL_NORM,
    LAYERS,
    OUTPUT_LAYER,
    POSITION_EMBEDDINGS,
    WORD_EMBEDDINGS,
)
from megatron.model.settings import ModelSettings

_GELUS: Final = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu")
"""Activation functions; a model with another function is written as OPT's."""


def _table() -> Table:
    linears = {
        "self_attention.linear_proj": "attn.c_proj",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    }
    norms = {
        f"{LAYERS}input_layernorm": "transformer.h.{}.ln_1",
        f"{LAYERS}pre_mlp_layernorm": "transformer.h.{}.ln_2",
        FINAL_NORM: "transformer.ln_f",
    }
    table: dict[str, Layout] = {
        WORD_EMBEDDINGS: Same("transformer.wte.weight"),
        f"{POSITION_EMBEDDINGS}.weight": Same("transformer.wpe.weight"),
        OUTPUT_LAYER: Same("lm_head.weight"),
    }
    parts = Heads("q", "k", "v")
    for ours, theirs in linears.items():
        name = f"transformer.h.{{}}.{theirs}"
        table[f"{LAYERS}{ours}.weight"] = Transposed(Same(f"{name}.weight"))
        table[f"{LAYERS}{ours}.bias"] = Same(f"{name}.bias")
    fused = "transformer.h.{}.attn.c_attn"
    qkv = f"{LAYERS}self_attention.linear_qkv"
    table[f"{qkv}.weight"] = Transposed(InOne(f"{fused}.weight", parts))
    table[f"{qkv}.bias"] = InOne(f"{fused}.bias", parts)
    for ours, theirs in norms.items():
        table |= {f"{ours}.{kind}": Same(f"{theirs}.{kind}") for kind in ("weight", "bias")}
    return table


def _read(c: Fields) -> dict[str, Any]:
    hidden, heads = c.whole("n_embd"), c.whole("n_head")
    if hidden % heads:
        raise ForeignError(f"{c.origin}: n_head {heads} does not divide n_embd {hidden}")
    c.check("activation_function", _GELUS, "gelu_new")
    c.check("scale_attn_weights", (True,), True)
    c.check("scale_attn_by_inverse_layer_idx", (False,), False)
    c.check("add_cross_attention", (False,), False)
    return read_function(c, "activation_function", "gelu_new") | {
        "num_layers": c.whole("n_layer", most=MOST_LAYERS),
        "hidden_size": hidden,
        "ffn_hidden_size": c.whole("n_inner", 4 * hidden),
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": hidden // heads,
        "max_position_embeddings": c.whole("n_positions"),
        "vocab_size": c.whole("vocab_size"),
        "norm_epsilon": c.positive("layer_norm_epsilon", 1e-5),
        "attention_dropout": c.share("attn_pdrop", 0.1),
        "hidden_dropout": c.share("resid_pdrop", 0.1),
        "init_method_std": c.number("initializer_range", 0.02),
        "tie_embeddings": c.truth("tie_word_embeddings", True),
    }


def _write(model: ModelSettings) -> dict[str, Any]:
    function = written_function(model)
    return {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_inner": model.mlp.ffn_hidden_size,
        "n_head": model.attention.num_attention_heads,
        "n_positions": model.positions.max_position_embeddings,
        "vocab_size": model.vocab_size,
        "activation_function": "gelu_new" if function == "gelu_pytorch_tanh" else function,
        "layer_norm_epsilon": model.norm.norm_epsilon,
        "attn_pdrop": model.attention.attention_dropout,
        "resid_pdrop": model.block.hidden_dropout,
        "embd_pdrop": model.block.hidden_dropout,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": model.vocabulary.tie_embeddings,
    }


GPT2 = Family(
    "gpt2",
    "gpt2",
    "GPT2LMHeadModel",
    "transformer.",
    _table(),
    _read,
    _write,
    tables={".attn.bias": is_causal_mask, ".attn.masked_bias": is_score_of_hidden},
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
)
