"""BLOOM: scores that fall with distance (ALiBi), and a norm of the embedding."""

from typing import Final

from megatron.checkpoint.foreign.family import Family, Values
from megatron.checkpoint.foreign.fields import MOST_LAYERS, Fields
from megatron.checkpoint.foreign.layouts import ForeignError, Same, Table
from megatron.checkpoint.foreign.plain_layers import named
from megatron.model.ownership import (
    EMBEDDING_NORM,
    FINAL_NORM,
    LAYERS,
    OUTPUT_LAYER,
    WORD_EMBEDDINGS,
)
from megatron.model.settings import ModelSettings

_LENGTH: Final = 2048
"""Tokens of a sample if a file does not tell them; ALiBi has no limit."""


def _read(c: Fields) -> Values:
    hidden, heads = c.whole("hidden_size"), c.whole("n_head")
    if hidden % heads:
        raise ForeignError(f"{c.origin}: n_head {heads} does not divide hidden_size {hidden}")
    c.check("slow_but_exact", (False,), False)
    return {
        "num_layers": c.whole("n_layer", most=MOST_LAYERS),
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden,
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": hidden // heads,
        "position_embedding_type": "alibi",
        "max_position_embeddings": c.whole("seq_length", _LENGTH),
        "vocab_size": c.whole("vocab_size"),
        "embed_layernorm": True,
        "norm_epsilon": c.positive("layer_norm_epsilon", 1e-5),
        "apply_residual_connection_post_layernorm": c.truth(
            "apply_residual_connection_post_layernorm", False
        ),
        "attention_dropout": c.share("attention_dropout", 0.0),
        "hidden_dropout": c.share("hidden_dropout", 0.0),
        "init_method_std": c.number("initializer_range", 0.02),
        "tie_embeddings": c.truth("tie_word_embeddings", True),
    }


def _write(model: ModelSettings) -> Values:
    return {
        "n_layer": model.num_layers,
        "hidden_size": model.hidden_size,
        "n_head": model.attention.num_attention_heads,
        "seq_length": max(model.positions.max_position_embeddings, model.seq_length),
        "vocab_size": model.vocab_size,
        "layer_norm_epsilon": model.norm.norm_epsilon,
        "apply_residual_connection_post_layernorm": (
            model.block.apply_residual_connection_post_layernorm
        ),
        "attention_dropout": model.attention.attention_dropout,
        "hidden_dropout": model.block.hidden_dropout,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": model.vocabulary.tie_embeddings,
    }


_LAYER: Final = "transformer.h.{}"
_TABLE: Final[Table] = {
    WORD_EMBEDDINGS: Same("transformer.word_embeddings.weight"),
    OUTPUT_LAYER: Same("lm_head.weight"),
    **named(
        {
            EMBEDDING_NORM: "transformer.word_embeddings_layernorm",
            f"{LAYERS}input_layernorm": f"{_LAYER}.input_layernorm",
            f"{LAYERS}self_attention.linear_qkv": f"{_LAYER}.self_attention.query_key_value",
            f"{LAYERS}self_attention.linear_proj": f"{_LAYER}.self_attention.dense",
            f"{LAYERS}pre_mlp_layernorm": f"{_LAYER}.post_attention_layernorm",
            f"{LAYERS}mlp.linear_fc1": f"{_LAYER}.mlp.dense_h_to_4h",
            f"{LAYERS}mlp.linear_fc2": f"{_LAYER}.mlp.dense_4h_to_h",
            FINAL_NORM: "transformer.ln_f",
        }
    ),
}

BLOOM: Final = Family(
    "bloom",
    "bloom",
    "BloomForCausalLM",
    "transformer.",
    _TABLE,
    _read,
    _write,
    aliases={
        "n_embed": "hidden_size",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    },
)
