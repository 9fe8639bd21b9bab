"""Nemotron (Minitron): squared ReLU, LayerNorms that keep their weight's distance from 1."""

from typing import Final

from megatron.checkpoint.foreign.family import (
    Values,
    biases,
    llama_like,
    sizes,
    written_biases,
    written_sizes,
)
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.layouts import Table
from megatron.checkpoint.foreign.plain_layers import named, read_function, written_function
from megatron.checkpoint.foreign.rotation import read_rotation, write_rotation
from megatron.model.ownership import FINAL_NORM, LAYERS
from megatron.model.settings import ModelSettings


def _read(c: Fields) -> Values:
    return (
        sizes(c)
        | read_rotation(c, share=0.5)
        | read_function(c, "hidden_act", "relu2")
        | biases(c)
        | {
            "init_method_std": c.number("initializer_range", 0.0134),
            "normalization": "LayerNorm",
            "norm_epsilon": c.positive("norm_eps", 1e-5),
            "apply_layernorm_1p": True,
            "tie_embeddings": c.truth("tie_word_embeddings", False),
        }
    )


def _write(model: ModelSettings) -> Values:
    written = written_sizes(model) | write_rotation(model) | written_biases(model)
    del written["rms_norm_eps"]
    return written | {
        "hidden_act": written_function(model),
        "partial_rotary_factor": model.positions.rotary_percent,
        "norm_eps": model.norm.norm_epsilon,
    }


_LAYER: Final = "model.layers.{}"
_TABLE: Final[Table] = named(
    {
        f"{LAYERS}input_layernorm": f"{_LAYER}.input_layernorm",
        f"{LAYERS}pre_mlp_layernorm": f"{_LAYER}.post_attention_layernorm",
        f"{LAYERS}mlp.linear_fc1": f"{_LAYER}.mlp.up_proj",
        f"{LAYERS}mlp.linear_fc2": f"{_LAYER}.mlp.down_proj",
        FINAL_NORM: "model.norm",
    }
)

NEMOTRON: Final = llama_like("nemotron", "Nemotron", {}, _read, _write, more=_TABLE)
