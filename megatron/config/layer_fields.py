"""Turns the flags of what layers are made of into fields of the model."""

from dataclasses import fields
from typing import Any

from megatron.config.declare import Flags
from megatron.config.flags import ModelFlags
from megatron.config.layer_flags import LayerFlags
from megatron.config.layer_patterns import parse_pattern, parse_window
from megatron.model.config import ModelConfig, Pattern


def layer_fields(flags: Flags) -> dict[str, Any]:
    """The fields of the model about what its layers are made of."""
    layers = flags[LayerFlags]
    names = {field.name for field in fields(ModelConfig)}
    same = {name: value for name, value in vars(layers).items() if name in names}
    derived = {
        "window_size": parse_window(layers.window_size),
        "window_pattern": window_pattern(flags),
        "no_rope_pattern": no_rope_pattern(flags),
    }
    if layers.query_pre_attn_scalar is not None:
        derived["softmax_scale"] = layers.query_pre_attn_scalar**-0.5
    if layers.scale_embeddings_by_hidden_size:
        derived["embedding_multiplier"] = flags[ModelFlags].hidden_size ** 0.5
    return same | derived


def window_pattern(flags: Flags) -> Pattern:
    """Which layers have the window; errors as of ``parse_pattern``."""
    words = flags[LayerFlags].window_attn_skip_freq
    return parse_pattern("--window-attn-skip-freq", words, 0, flags[ModelFlags].num_layers)


def no_rope_pattern(flags: Flags) -> Pattern:
    """Which layers do not rotate; errors as of ``parse_pattern``."""
    return parse_pattern(
        "--no-rope-freq", flags[LayerFlags].no_rope_freq, 1, flags[ModelFlags].num_layers
    )
