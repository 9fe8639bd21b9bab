"""Llama 2 and 3, Mistral, Qwen 2 and 3: RMSNorm, rotated queries and keys, SwiGLU."""

from typing import Final

from megatron.checkpoint.foreign.family import (
    QK_NORMS,
    Values,
    layer_types,
    llama_like,
    sizes,
    windows,
    written_sizes,
)
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.layouts import ForeignError
from megatron.checkpoint.foreign.rotation import read_rotation, write_rotation
from megatron.model.config import ModelConfig

_NORMS: Final = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
}
_BUFFERS: Final = (".rotary_emb.inv_freq",)
"""Tables that older versions of ``transformers`` have saved."""


def _common(c: Fields, **defaults: int) -> Values:
    c.check("hidden_act", ("silu", "swish"), "silu")
    tied = c.truth("tie_word_embeddings", False)
    return sizes(c, **defaults) | read_rotation(c) | {"swiglu": True, "tie_embeddings": tied}


def _written(model: ModelConfig) -> Values:
    return written_sizes(model) | write_rotation(model) | {"hidden_act": "silu"}


def _read_llama(c: Fields) -> Values:
    biases = c.truth("attention_bias", False), c.truth("mlp_bias", False)
    if len(set(biases)) > 1:
        raise ForeignError(
            f"{c.origin}: attention_bias and mlp_bias differ, and this program has biases in all "
            "linear layers or in none"
        )
    return _common(c) | {"add_bias_linear": biases[0]}


def _write_llama(model: ModelConfig) -> Values:
    bias = model.add_bias_linear
    return _written(model) | {"attention_bias": bias, "mlp_bias": bias}


def _read_mistral(c: Fields) -> Values:
    common = _common(c, groups=8)
    size = c.whole_or_none("sliding_window", 4096)
    return common | windows(c, size, [1] * common["num_layers"])


def _write_mistral(model: ModelConfig) -> Values:
    size = model.window_size
    return _written(model) | {"sliding_window": None if size is None else size + 1}


def _qwen(c: Fields, common: Values) -> Values:
    layers, first = common["num_layers"], c.any("max_window_layers", 28)
    if not c.truth("use_sliding_window", False):
        return common
    if not isinstance(first, int):
        raise c.fault("max_window_layers", "a whole number")
    size = c.whole_or_none("sliding_window", 4096)
    return common | windows(c, size, [int(i >= first) for i in range(layers)])


def _write_qwen(model: ModelConfig) -> Values:
    size, local = model.window_size, [model.is_local(i) for i in range(model.num_layers)]
    written: Values = {"use_sliding_window": size is not None}
    if size is not None:
        written |= {
            "sliding_window": size + 1,
            "max_window_layers": local.index(True) if any(local) else model.num_layers,
            "layer_types": layer_types(model),
        }
    return _written(model) | written


def _read_qwen2(c: Fields) -> Values:
    if "head_dim" in c and c.whole("head_dim") * c.whole("num_attention_heads") != c.whole(
        "hidden_size"
    ):
        raise c.fault("head_dim", "hidden_size / num_attention_heads, as Qwen 2 needs it")
    return _qwen(c, _common(c, groups=32)) | {"add_qkv_bias": True}


def _read_qwen3(c: Fields) -> Values:
    c.check("attention_bias", (False,), False)
    return _qwen(c, _common(c, head_dim=128, groups=32)) | {"qk_layernorm": True}


LLAMA: Final = llama_like("llama", "Llama", _NORMS, _read_llama, _write_llama, _BUFFERS)
MISTRAL: Final = llama_like("mistral", "Mistral", _NORMS, _read_mistral, _write_mistral, _BUFFERS)
QWEN2: Final = llama_like("qwen2", "Qwen2", _NORMS, _read_qwen2, _write_qwen, _BUFFERS)
QWEN3: Final = llama_like("qwen3", "Qwen3", _NORMS | QK_NORMS, _read_qwen3, _write_qwen, _BUFFERS)
