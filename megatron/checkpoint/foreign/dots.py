"""dots.llm1: Qwen 3's attention with DeepSeek-V3's experts."""

from typing import Final

from megatron.checkpoint.foreign.deepseek import (
    V3_EXPERTS,
    read_biased_choice,
    read_experts,
    read_groups,
    written_experts,
)
from megatron.checkpoint.foreign.family import (
    QK_NORMS,
    Values,
    attention_biases,
    layer_types,
    llama_like,
    windows,
    written_biases,
    written_window,
)
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.llama import NORMS, common_fields, written_fields
from megatron.model.settings import ModelSettings

_WINDOW: Final = 4096
_FIRST: Final = 62
"""First layer with a window, if a file does not tell it."""

_METHOD: Final = "noaux_tc"
"""The word of published files in ``scoring_func``; DeepSeek-V3 has it in ``topk_method``."""


def _read(c: Fields) -> Values:
    found = common_fields(c, groups=32) | attention_biases(c) | {"qk_layernorm": True}
    layers, first = found["num_layers"], c.any("max_window_layers", _FIRST)
    found |= read_experts(c, layers)
    given = {"norm_topk_prob": False} | dict(c.all)
    if c.any("scoring_func", "sigmoid") == _METHOD:
        given["scoring_func"] = "sigmoid"  # transformers takes sigmoids whatever stands there
    found |= read_biased_choice(Fields(given, c.origin))
    if type(first) is not int:
        raise c.fault("max_window_layers", "a whole number")
    size = c.whole_or_none("sliding_window", _WINDOW)
    local = [int(size is not None and layer >= first) for layer in range(layers)]
    return found | windows(c, size, local) | read_groups(c, found, best=2, groups=1, chosen=1)


def _write(model: ModelSettings) -> Values:
    return (
        written_fields(model)
        | written_experts(model)
        | {
            "attention_bias": written_biases(model)["attention_bias"],
            "norm_topk_prob": True,
            "sliding_window": written_window(model),
            "layer_types": layer_types(model),
        }
    )


DOTS1: Final = llama_like(
    "dots1",
    "Dots1",
    NORMS | QK_NORMS,
    _read,
    _write,
    more=V3_EXPERTS,
    aliases={"num_local_experts": "n_routed_experts"},
)
