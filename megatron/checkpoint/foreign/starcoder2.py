"""StarCoder 2: rotated queries and keys, LayerNorms, an MLP without a gate, biases."""

from typing import Final

from megatron.checkpoint.foreign.family import (
    Values,
    llama_like,
    sizes,
    windows,
    written_sizes,
    written_window,
)
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.layouts import Table
from megatron.checkpoint.foreign.plain_layers import (
    named,
    read_dropout,
    read_function,
    written_function,
)
from megatron.checkpoint.foreign.rotation import read_rotation, write_rotation
from megatron.model.ownership import FINAL_NORM, LAYERS
from megatron.model.settings import ModelSettings


def _read(c: Fields) -> Values:
    common = sizes(c, groups=2)
    size = c.whole_or_none("sliding_window", None)
    return (
        common
        | read_rotation(c)
        | read_function(c, "hidden_act", "gelu_pytorch_tanh")
        | read_dropout(c, "residual_dropout", "embedding_dropout", 0.0)
        | windows(Fields({}, c.origin), size, [1] * common["num_layers"])
        | {
            "init_method_std": c.number("initializer_range", 0.018042),
            "normalization": "LayerNorm",
            "norm_epsilon": c.positive("norm_epsilon", 1e-5),
            "add_bias_linear": c.truth("use_bias", True),
            "tie_embeddings": c.truth("tie_word_embeddings", True),
        }
    )


def _write(model: ModelSettings) -> Values:
    written = written_sizes(model) | write_rotation(model)
    del written["rms_norm_eps"]
    return written | {
        "hidden_act": written_function(model),
        "residual_dropout": model.block.hidden_dropout,
        "embedding_dropout": model.block.hidden_dropout,
        "sliding_window": written_window(model),
        "norm_epsilon": model.norm.norm_epsilon,
        "use_bias": model.block.add_bias_linear,
    }


_LAYER: Final = "model.layers.{}"
_TABLE: Final[Table] = named(
    {
        f"{LAYERS}input_layernorm": f"{_LAYER}.input_layernorm",
        f"{LAYERS}pre_mlp_layernorm": f"{_LAYER}.post_attention_layernorm",
        f"{LAYERS}mlp.linear_fc1": f"{_LAYER}.mlp.c_fc",
        f"{LAYERS}mlp.linear_fc2": f"{_LAYER}.mlp.c_proj",
        FINAL_NORM: "model.norm",
    }
)

STARCODER2: Final = llama_like("starcoder2", "Starcoder2", {}, _read, _write, more=_TABLE)
