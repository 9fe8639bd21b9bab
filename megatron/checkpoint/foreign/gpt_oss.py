"""GPT-OSS: attention sinks, a window in every other layer, YaRN, and experts with biases.

Files hold the experts of a layer in one tensor, stored transposed, whose gate and up columns take
turns. Experts in MXFP4 are refused (``families.py``).
"""

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from megatron.checkpoint.foreign.family import (
    Values,
    layer_types,
    llama_like,
    sizes,
    windows,
    written_sizes,
)
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.layouts import Layout, Same
from megatron.checkpoint.foreign.llama import NORMS
from megatron.checkpoint.foreign.rotation import read_rotation, scaling_of, write_rotation
from megatron.model.ownership import LAYERS
from megatron.model.settings import ModelSettings
from megatron.parallel.box import Shape

_WINDOW: Final = 128
_DEFAULTS: Final[Values] = {"rms_norm_eps": 1e-5, "sliding_window": _WINDOW}
_YARN: Final[Values] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The rotation of a ``config.json`` that tells none."""


class Stacked(Layout):
    """One tensor [e, ...] of all experts; in our tensor the experts lie one below the other.

    Matrices are stored transposed, [e, i, o].

    Args:
        name: name of their tensor.
        takes_turns: gate and up take turns in it; in ours, each expert's gate comes first.
    """

    def __init__(self, name: str, *, takes_turns: bool = False) -> None:
        super().__init__(name)
        self._takes_turns = takes_turns

    def shapes(self, ours: Shape, model: ModelSettings) -> list[Shape]:
        """As in ``Layout``."""
        rows = ours[0] // model.experts.num_experts
        return [(model.experts.num_experts, *ours[1:], rows)]

    def join(self, theirs: Sequence[Tensor], model: ModelSettings) -> Tensor:
        """As in ``Layout``."""
        by_expert = theirs[0].movedim(-1, 1)
        if self._takes_turns:
            by_expert = by_expert.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return by_expert.flatten(0, 1)

    def split(self, ours: Tensor, model: ModelSettings) -> list[Tensor]:
        """As in ``Layout``."""
        by_expert = ours.unflatten(0, (model.experts.num_experts, -1))
        if self._takes_turns:
            by_expert = by_expert.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return [by_expert.movedim(1, -1)]


def _read(c: Fields) -> Values:
    for name, value in (("attention_bias", True), ("hidden_act", "silu"), ("swiglu_alpha", 1.702)):
        c.check(name, (value,), value)
    given = _DEFAULTS | dict(c.all)
    if scaling_of(c) is None:
        given["rope_scaling"] = _YARN
    filled = Fields(given, c.origin)
    common = sizes(filled, head_dim=64, groups=8)
    size = filled.whole_or_none("sliding_window", _WINDOW)
    local = [(layer + 1) % 2 for layer in range(common["num_layers"])]
    return (
        common
        | read_rotation(filled, base=150000)
        | windows(filled, size, local)
        | {
            "tie_embeddings": c.truth("tie_word_embeddings", False),
            "add_bias_linear": True,
            "softmax_type": "learnable",
            "activation": "quick_geglu",
            "activation_func_clamp_value": c.positive("swiglu_limit", 7.0),
            "glu_linear_offset": 1.0,
            "num_experts": c.whole("num_local_experts", 128),
            "moe_ffn_hidden_size": common["ffn_hidden_size"],
            "moe_router_topk": c.whole("num_experts_per_tok", 4),
            "moe_aux_loss_coeff": (c.number("router_aux_loss_coef", 0.001),),
        }
    )


def _write(model: ModelSettings) -> Values:
    window = model.attention.window_size
    plain = {"rope_scaling": {"rope_type": "default"}}  # without it, a file has _YARN
    written: Values = written_sizes(model) | plain | write_rotation(model)
    return written | {
        "intermediate_size": model.experts.moe_ffn_hidden_size,
        "hidden_act": "silu",
        "attention_bias": True,
        "swiglu_limit": model.mlp.activation_func_clamp_value,
        "num_local_experts": model.experts.num_experts,
        "num_experts_per_tok": model.experts.moe_router_topk,
        "router_aux_loss_coef": model.balance.moe_aux_loss_coeff[0],
        "sliding_window": _WINDOW if window is None else window + 1,
        "layer_types": layer_types(model),
    }


_LAYER: Final = "model.layers.{}"
_EXPERTS: Final = f"{_LAYER}.mlp.experts"

GPT_OSS: Final = llama_like(
    "gpt_oss",
    "GptOss",
    NORMS,
    _read,
    _write,
    aliases={"num_experts": "num_local_experts"},
    more={
        f"{LAYERS}self_attention.softmax_offset": Same(f"{_LAYER}.self_attn.sinks"),
        f"{LAYERS}mlp.router.weight": Same(f"{_LAYER}.mlp.router.weight"),
        f"{LAYERS}mlp.router.bias": Same(f"{_LAYER}.mlp.router.bias"),
        f"{LAYERS}mlp.experts.linear_fc1.weight": Stacked(
            f"{_EXPERTS}.gate_up_proj", takes_turns=True
        ),
        f"{LAYERS}mlp.experts.linear_fc1.bias": Stacked(
            f"{_EXPERTS}.gate_up_proj_bias", takes_turns=True
        ),
        f"{LAYERS}mlp.experts.linear_fc2.weight": Stacked(f"{_EXPERTS}.down_proj"),
        f"{LAYERS}mlp.experts.linear_fc2.bias": Stacked(f"{_EXPERTS}.down_proj_bias"),
    },
)
