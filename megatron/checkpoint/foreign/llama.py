"""Llama 2 and 3, Mistral, Qwen 2 and 3: RMSNorm, rotated queries and keys, SwiGLU.

Their mixtures of experts are in ``mixtures.py``.
"""

from typing import Final

from megatron.checkpoint.foreign.derived import is_rotation
from megatron.checkpoint.foreign.family import (
    QK_NORMS,
    Values,
    attention_biases,
    biases,
    check_widths,
    layer_types,
    llama_like,
    sizes,
    windows,
    written_biases,
    written_sizes,
    written_window,
)
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.rotation import read_rotation, write_rotation
from megatron.model.settings import ModelSettings

NORMS: Final = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
}
_TABLES: Final = {".rotary_emb.inv_freq": is_rotation}
"""Tables (not weights) that older versions of ``transformers`` have saved."""


def common_fields(c: Fields, *, base: int = 10000, **defaults: int | None) -> Values:
    """Return the fields of our model that all families of this file name alike.

    Args:
        c: fields of ``config.json``.
        base: default of the RoPE theta.
        defaults: as in ``sizes``.
    """
    c.check("hidden_act", ("silu", "swish"), "silu")
    own = {"activation": "swiglu", "tie_embeddings": c.truth("tie_word_embeddings", False)}
    return sizes(c, **defaults) | read_rotation(c, base) | own


def written_fields(model: ModelSettings) -> Values:
    """Return the fields of ``config.json`` that all families of this file have."""
    return written_sizes(model) | write_rotation(model) | {"hidden_act": "silu"}


def _read_llama(c: Fields) -> Values:
    check_widths(c)
    return common_fields(c) | biases(c)


def _write_llama(model: ModelSettings) -> Values:
    return written_fields(model) | written_biases(model)


def read_mistral(c: Fields) -> Values:
    """See ``Family.read``."""
    common = common_fields(c, groups=8)
    size = c.whole_or_none("sliding_window", 4096)
    return common | windows(c, size, [1] * common["num_layers"])


def write_mistral(model: ModelSettings) -> Values:
    """See ``Family.write``."""
    written: Values = {"sliding_window": (window := written_window(model))}
    if window is not None and not all(model.attention.is_local(i) for i in range(model.num_layers)):
        written["layer_types"] = layer_types(model)
    return written_fields(model) | written


def check_no_windows(c: Fields, layers: int) -> None:
    """Refuse ``layer_types`` with windows in a file that has no window.

    Args:
        c: fields of ``config.json``.
        layers: number of layers.
    """
    words = c.words("layer_types", ("sliding_attention", "full_attention"), layers) or []
    if "sliding_attention" in words:
        raise c.fault("layer_types", "full_attention alone, as use_sliding_window is false")


def _qwen(c: Fields, common: Values) -> Values:
    layers, first = common["num_layers"], c.any("max_window_layers", 28)
    if not c.truth("use_sliding_window", False):
        check_no_windows(c, layers)
        return common
    if not isinstance(first, int):
        raise c.fault("max_window_layers", "a whole number")
    size = c.whole_or_none("sliding_window", 4096)
    return common | windows(c, size, [int(i >= first) for i in range(layers)])


def write_qwen(model: ModelSettings) -> Values:
    """See ``Family.write``."""
    window, layers = written_window(model), range(model.num_layers)
    written: Values = {"use_sliding_window": window is not None}
    if window is not None:
        written |= {
            "sliding_window": window,
            "max_window_layers": next(filter(model.attention.is_local, layers)),
            "layer_types": layer_types(model),
        }
    return written_fields(model) | written


def check_head_width(c: Fields, family: str) -> None:
    """Refuse heads that are together wider or narrower than the hidden size."""
    heads, hidden = c.whole("num_attention_heads"), c.whole("hidden_size")
    if "head_dim" in c and c.whole("head_dim") * heads != hidden:
        raise c.fault("head_dim", f"hidden_size / num_attention_heads, as {family} needs it")


def read_qwen2(c: Fields) -> Values:
    """See ``Family.read``."""
    check_head_width(c, "Qwen 2")
    return _qwen(c, common_fields(c, groups=32)) | {"add_qkv_bias": True}


def read_qwen3(c: Fields, head_dim: int | None = 128) -> Values:
    """See ``Family.read``; ``head_dim``: as in ``sizes``, where mixtures have another default."""
    common = common_fields(c, head_dim=head_dim, groups=32) | attention_biases(c)
    return _qwen(c, common) | {"qk_layernorm": True}


def write_qwen3(model: ModelSettings) -> Values:
    """See ``Family.write``."""
    return write_qwen(model) | {"attention_bias": written_biases(model)["attention_bias"]}


LLAMA: Final = llama_like("llama", "Llama", NORMS, _read_llama, _write_llama, _TABLES)
MISTRAL: Final = llama_like("mistral", "Mistral", NORMS, read_mistral, write_mistral, _TABLES)
QWEN2: Final = llama_like("qwen2", "Qwen2", NORMS, read_qwen2, write_qwen, _TABLES)
QWEN3: Final = llama_like("qwen3", "Qwen3", NORMS | QK_NORMS, read_qwen3, write_qwen3, _TABLES)
