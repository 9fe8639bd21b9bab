"""Gemma 1, 2, 3 (text): GeGLU, scaled embeddings, norm weights kept as their difference from 1."""

from typing import Final

from megatron.checkpoint.foreign.family import (
    QK_NORMS,
    Values,
    check_widths,
    layer_types,
    llama_like,
    sizes,
    windows,
    written_sizes,
)
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.rotation import (
    read_base,
    read_rotation,
    read_two_rotations,
    write_rotation,
)
from megatron.flags.readable import plain_number
from megatron.model.settings import ModelSettings

_WINDOW: Final = 4096
"""The window that a file tells of even if no layer has it: ``transformers`` needs a number."""

_TANH: Final = ("gelu_pytorch_tanh",)


def _common(c: Fields, activation: str) -> Values:
    allowed = (*_TANH, "gelu") if activation == "hidden_act" else _TANH
    c.check(activation, allowed, _TANH[0])  # "gelu" in the first files also means the tanh form
    c.check("attention_bias", (False,), False)
    c.check("use_bidirectional_attention", (False,), False)
    common = sizes(c, head_dim=256)
    return common | {
        "activation": "geglu",
        "apply_layernorm_1p": True,
        "embedding_multiplier": common["hidden_size"] ** 0.5,
        "tie_embeddings": c.truth("tie_word_embeddings", True),
    }


def _written(model: ModelSettings, activation: str) -> Values:
    return written_sizes(model) | {activation: _TANH[0], "attention_bias": False}


def _read_1(c: Fields) -> Values:
    return _common(c, "hidden_act") | read_rotation(c)


def _write_1(model: ModelSettings) -> Values:
    return _written(model, "hidden_act") | write_rotation(model)


def _cap(c: Fields, name: str, default: float) -> float:
    """Return a cap of logits; 0: there is none, which a file tells by ``null``."""
    if c.is_null(name):
        return 0.0
    cap = c.number(name, default)
    if name in c and not cap:
        raise c.fault(name, "null or a number above 0")
    return cap


def _with_post_norms(c: Fields, caps: tuple[float, float]) -> Values:
    """Return the fields that Gemma 2 and 3 share; ``caps``: defaults of the two logit caps."""
    check_widths(c)
    common = _common(c, "hidden_activation")
    scalar = c.whole("query_pre_attn_scalar", 256)
    return common | {
        "softmax_scale": None if scalar == common["kv_channels"] else scalar**-0.5,
        "attn_logit_softcapping": _cap(c, "attn_logit_softcapping", caps[0]),
        "logit_softcap": _cap(c, "final_logit_softcapping", caps[1]),
        "post_self_attn_layernorm": True,
        "post_mlp_layernorm": True,
    }


def _written_post_norms(model: ModelSettings) -> Values:
    scale = model.attention.softmax_scale
    return _written(model, "hidden_activation") | {
        "query_pre_attn_scalar": model.attention.kv_channels if scale is None else round(scale**-2),
        "attn_logit_softcapping": model.attention.attn_logit_softcapping or None,
        "final_logit_softcapping": model.vocabulary.logit_softcap or None,
        "sliding_window": _WINDOW
        if model.attention.window_size is None
        else model.attention.window_size + 1,
        "layer_types": layer_types(model),
    }


def _read_2(c: Fields) -> Values:
    common = _with_post_norms(c, (50.0, 30.0)) | read_rotation(c)
    local = [int(i % 2 == 0) for i in range(common["num_layers"])]
    return common | windows(c, c.whole_or_none("sliding_window", _WINDOW), local)


def _write_2(model: ModelSettings) -> Values:
    return _written_post_norms(model) | write_rotation(model)


def _read_3(c: Fields) -> Values:
    """A cap of scores is refused: ``transformers`` reads past it, and the model may need it."""
    c.check("attn_logit_softcapping", (None,), None)
    common = _with_post_norms(c, (0.0, 0.0)) | {"qk_layernorm": True}
    period = c.whole("sliding_window_pattern", 6)
    local = [int((i + 1) % period != 0) for i in range(common["num_layers"])]
    rotation, base = read_two_rotations(
        c, 1_000_000, lambda: read_base(c, "rope_local_base_freq", 10000)
    )
    common |= rotation
    return common | windows(c, c.whole_or_none("sliding_window", _WINDOW), local, base)


def _write_3(model: ModelSettings) -> Values:
    local = model.positions.rotary_base_local
    base = model.positions.rotary_base if local is None else local
    near = {"rope_local_base_freq": plain_number(base)}
    return _written_post_norms(model) | write_rotation(model) | near


_NORMS: Final = {
    "input_layernorm": "input_layernorm",
    "post_self_attn_layernorm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
_OWN_NORMS: Final = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
}

GEMMA: Final = llama_like("gemma", "Gemma", _OWN_NORMS, _read_1, _write_1)
GEMMA2: Final = llama_like("gemma2", "Gemma2", _NORMS, _read_2, _write_2)
GEMMA3: Final = llama_like("gemma3_text", "Gemma3", _NORMS | QK_NORMS, _read_3, _write_3)
