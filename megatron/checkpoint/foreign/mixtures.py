"""Mixtral, Qwen 2 MoE, Qwen 3 MoE and OLMoE: dense families with experts in place of the MLP."""

from typing import Any, Final

from megatron.checkpoint.foreign.family import QK_NORMS, Values, llama_like, written_biases
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.layouts import (
    ForeignError,
    Halves,
    Layout,
    OfExperts,
    Same,
    Table,
)
from megatron.checkpoint.foreign.llama import (
    NORMS,
    check_head_width,
    check_no_windows,
    common_fields,
    read_mistral,
    read_qwen2,
    read_qwen3,
    write_mistral,
    write_qwen,
    written_fields,
)
from megatron.layers.patterns import LayerPattern
from megatron.model.ownership import LAYERS
from megatron.model.settings import ModelSettings


def _read_mixtral(c: Fields) -> Values:
    c.check("router_jitter_noise", (0, 0.0), 0.0)
    given = {"sliding_window": None, "rope_theta": 1_000_000, "rms_norm_eps": 1e-5} | dict(c.all)
    dense = read_mistral(Fields(given, c.origin))
    return dense | {
        "num_experts": c.whole("num_local_experts", 8),
        "moe_ffn_hidden_size": dense["ffn_hidden_size"],
        "moe_router_topk": c.whole("num_experts_per_tok", 2),
        "moe_aux_loss_coeff": (c.number("router_aux_loss_coef", 0.001),),
    }


def _write_mixtral(model: ModelSettings) -> Values:
    return write_mistral(model) | {
        "intermediate_size": model.experts.moe_ffn_hidden_size,
        "num_local_experts": model.experts.num_experts,
        "num_experts_per_tok": model.experts.moe_router_topk,
        "router_aux_loss_coef": model.balance.coefficients[0][1],
    }


def _read_qwen2(c: Fields) -> Values:
    c.check("qkv_bias", (True,), True)
    _check_windows(c)
    return (
        read_qwen2(c)
        | _qwen_experts(c, 60, 4, 1408)
        | {
            "moe_shared_expert_intermediate_size": c.whole("shared_expert_intermediate_size", 5632),
            "moe_shared_expert_gate": True,
        }
    )


def _read_qwen3(c: Fields) -> Values:
    _check_windows(c)
    return read_qwen3(c, head_dim=None) | _qwen_experts(c, 128, 8, 768)


def _check_windows(c: Fields) -> None:
    """Refuse windows: ``transformers`` gives them to other layers than in the dense families."""
    c.check("use_sliding_window", (False,), False)
    check_no_windows(c, c.whole("num_hidden_layers"))


def _qwen_experts(c: Fields, experts: int, topk: int, width: int) -> Values:
    """Return the fields of our model about experts; the numbers are defaults of left-out fields."""
    return {
        "num_experts": c.whole("num_experts", experts),
        "moe_layer_freq": _pattern(c),
        "moe_ffn_hidden_size": c.whole("moe_intermediate_size", width),
        "moe_router_topk": c.whole("num_experts_per_tok", topk),
        "moe_router_pre_softmax": not c.truth("norm_topk_prob", False),
        "moe_aux_loss_coeff": (c.number("router_aux_loss_coef", 0.001),),
    }


def _pattern(c: Fields) -> LayerPattern:
    """Return which layers have experts."""
    layers, step = c.whole("num_hidden_layers"), c.whole("decoder_sparse_step", 1)
    dense: Any = c.any("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(index) is int for index in dense):
        raise c.fault("mlp_only_layers", "a list of numbers of layers")
    entries = tuple(int((i + 1) % step == 0 and i not in dense) for i in range(layers))
    if not any(entries):
        raise ForeignError(
            f"{c.origin}: mlp_only_layers {dense} and decoder_sparse_step {step} leave none of the "
            f"num_hidden_layers {layers} layers experts"
        )
    return LayerPattern(listed=entries)


def _write_qwen(model: ModelSettings) -> Values:
    layers = range(model.num_layers)
    return write_qwen(model) | {
        "num_experts": model.experts.num_experts,
        "moe_intermediate_size": model.experts.moe_ffn_hidden_size,
        "num_experts_per_tok": model.experts.moe_router_topk,
        "norm_topk_prob": not model.experts.moe_router_pre_softmax,
        "router_aux_loss_coef": model.balance.coefficients[0][1],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in layers if not model.experts.in_layer(i)],
    }


def _write_qwen3(model: ModelSettings) -> Values:
    return _write_qwen(model) | {"attention_bias": written_biases(model)["attention_bias"]}


def _write_qwen2(model: ModelSettings) -> Values:
    width = model.experts.moe_shared_expert_intermediate_size
    return _write_qwen(model) | {"qkv_bias": True, "shared_expert_intermediate_size": width}


def _read_olmoe(c: Fields) -> Values:
    if "clip_qkv" in c:
        raise ForeignError(
            f"{c.origin}: clip_qkv is {c.any('clip_qkv')}, and this program does not clip queries, "
            "keys and values"
        )
    c.check("attention_bias", (False,), False)
    check_head_width(c, "OLMoE")
    common = common_fields(Fields({"rms_norm_eps": 1e-5} | dict(c.all), c.origin))
    return common | {
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
        "num_experts": c.whole("num_experts", 64),
        "moe_ffn_hidden_size": common["ffn_hidden_size"],
        "moe_router_topk": c.whole("num_experts_per_tok", 8),
        "moe_router_pre_softmax": not c.truth("norm_topk_prob", False),
        "moe_aux_loss_coeff": (c.number("router_aux_loss_coef", 0.01),),
    }


def _write_olmoe(model: ModelSettings) -> Values:
    return written_fields(model) | {
        "intermediate_size": model.experts.moe_ffn_hidden_size,
        "num_experts": model.experts.num_experts,
        "num_experts_per_tok": model.experts.moe_router_topk,
        "norm_topk_prob": not model.experts.moe_router_pre_softmax,
        "router_aux_loss_coef": model.balance.moe_aux_loss_coeff[0],
    }


def experts_table(block: str, gate: str, up: str, down: str) -> dict[str, Layout]:
    """Return the layouts of a router and of experts.

    Args:
        block: name of the module in a layer that holds router and experts.
        gate: name of an expert's gate projection.
        up: name of an expert's up projection.
        down: name of an expert's down projection.
    """

    def of_expert(name: str) -> str:
        return f"model.layers.{{}}.{block}.experts.{{expert}}.{name}.weight"

    return {
        f"{LAYERS}mlp.router.weight": Same(f"model.layers.{{}}.{block}.gate.weight"),
        f"{LAYERS}mlp.experts.linear_fc1.weight": OfExperts(Halves(of_expert(gate), of_expert(up))),
        f"{LAYERS}mlp.experts.linear_fc2.weight": OfExperts(Same(of_expert(down))),
    }


_QWEN: Final[Table] = experts_table("mlp", "gate_proj", "up_proj", "down_proj")
_SHARED: Final = "model.layers.{}.mlp.shared_expert"
_QWEN2: Final[Table] = {
    **_QWEN,
    f"{LAYERS}mlp.shared_experts.linear_fc1.weight": Halves(
        f"{_SHARED}.gate_proj.weight", f"{_SHARED}.up_proj.weight"
    ),
    f"{LAYERS}mlp.shared_experts.linear_fc2.weight": Same(f"{_SHARED}.down_proj.weight"),
    f"{LAYERS}mlp.shared_gate.weight": Same(f"{_SHARED}_gate.weight"),
}

_LOCAL: Final = {"num_local_experts": "num_experts"}

MIXTRAL: Final = llama_like(
    "mixtral",
    "Mixtral",
    NORMS,
    _read_mixtral,
    _write_mixtral,
    more=experts_table("block_sparse_moe", "w1", "w3", "w2"),
    aliases={"num_experts": "num_local_experts"},
)
QWEN2_MOE: Final = llama_like(
    "qwen2_moe", "Qwen2Moe", NORMS, _read_qwen2, _write_qwen2, more=_QWEN2
)
QWEN3_MOE: Final = llama_like(
    "qwen3_moe",
    "Qwen3Moe",
    NORMS | QK_NORMS,
    _read_qwen3,
    _write_qwen3,
    more=_QWEN,
    aliases=_LOCAL,  # version 5 of transformers writes it
)
OLMOE: Final = llama_like(
    "olmoe",
    "Olmoe",
    NORMS | QK_NORMS,
    _read_olmoe,
    _write_olmoe,
    more=_QWEN,
    aliases=_LOCAL,
)
