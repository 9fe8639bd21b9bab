"""Cohere 2 (Command R7B, Command A): attention and MLP read one LayerNorm without a bias.

Three of four layers have a window, and rotate neighbouring channels together. The others see all
earlier positions, and do not rotate.
"""

from typing import Final

from megatron.checkpoint.foreign.family import (
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
from megatron.checkpoint.foreign.llama import check_head_width
from megatron.checkpoint.foreign.rotation import read_rotation, write_rotation
from megatron.layers.patterns import LayerPattern
from megatron.model.settings import ModelSettings

_WINDOW: Final = 4096


def _read(c: Fields) -> Values:
    c.check("hidden_act", ("silu", "swish"), "silu")
    c.check("use_qk_norm", (False,), False)
    check_head_width(c, "Cohere 2")
    common, period = sizes(c), c.whole("sliding_window_pattern", 4)
    layers = common["num_layers"]
    local = [int((layer + 1) % period != 0) for layer in range(layers)]
    window = windows(c, c.whole("sliding_window", _WINDOW), local)
    pattern = window.get("window_attn_skip_freq", LayerPattern(listed=(0,) * layers))
    plain = tuple(1 - int(pattern.entry(layer, 0)) for layer in range(layers))
    return (
        common
        | read_rotation(c)
        | attention_biases(c)
        | window
        | {
            "activation": "swiglu",
            "normalization": "LayerNorm",
            "norm_epsilon": c.positive("layer_norm_eps", 1e-5),
            "add_bias_norm": False,
            "parallel_attn": True,
            "rotary_interleaved": True,
            "no_rope_freq": LayerPattern(listed=plain),
            "logit_multiplier": c.positive("logit_scale", 0.0625),
            "tie_embeddings": c.truth("tie_word_embeddings", True),
        }
    )


def _write(model: ModelSettings) -> Values:
    written = written_sizes(model) | write_rotation(model)
    del written["rms_norm_eps"]
    return written | {
        "hidden_act": "silu",
        "layer_norm_eps": model.norm.norm_epsilon,
        "attention_bias": written_biases(model)["attention_bias"],
        "logit_scale": model.vocabulary.logit_multiplier,
        "sliding_window": written_window(model) or _WINDOW,
        "layer_types": layer_types(model),
    }


COHERE2: Final = llama_like(
    "cohere2", "Cohere2", {"input_layernorm": "input_layernorm"}, _read, _write
)
