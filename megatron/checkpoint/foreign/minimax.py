"""MiniMax-M2: norms over the channels of all heads, a share of each head turns, and experts.

A bias of every expert joins its sigmoid for the choice, as in DeepSeek-V3.
"""

from typing import Final

from megatron.checkpoint.foreign.family import (
    QK_NORMS,
    Values,
    llama_like,
    sizes,
    written_sizes,
)
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.layouts import Same, Table
from megatron.checkpoint.foreign.llama import NORMS
from megatron.checkpoint.foreign.mixtures import experts_table
from megatron.checkpoint.foreign.rotation import read_rotation, write_rotation
from megatron.model.ownership import LAYERS
from megatron.model.settings import ModelSettings

_BASE: Final = 5_000_000
_PARTIAL: Final = "partial_rotary_factor"


def _read(c: Fields) -> Values:
    for name, allowed in (
        ("hidden_act", ("silu", "swish")),
        ("scoring_func", ("sigmoid",)),
        ("router_jitter_noise", (0.0, 0)),
        ("shared_intermediate_size", (0,)),
    ):
        c.check(name, allowed, allowed[0])
    given = {"head_dim": 128} | dict(c.all)
    if "rotary_dim" in c and _PARTIAL not in c:
        given[_PARTIAL] = c.whole("rotary_dim") / Fields(given, c.origin).whole("head_dim")
    filled = Fields(given, c.origin)
    common = sizes(filled, groups=8)
    return (
        common
        | read_rotation(filled, _BASE, share=1.0)
        | {
            "activation": "swiglu",
            "tie_embeddings": c.truth("tie_word_embeddings", False),
            "qk_layernorm": True,
            "qk_layernorm_across_heads": True,
            "num_experts": c.whole("num_local_experts", 256),
            "moe_ffn_hidden_size": common["ffn_hidden_size"],
            "moe_router_topk": c.whole("num_experts_per_tok", 8),
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_aux_loss_coeff": (c.number("router_aux_loss_coef", 0.001),),
        }
    )


def _write(model: ModelSettings) -> Values:
    width, share = model.attention.kv_channels, model.positions.rotary_percent
    return (
        written_sizes(model)
        | write_rotation(model)
        | {
            "hidden_act": "silu",
            "rotary_dim": int(width * share),
            _PARTIAL: share,
            "intermediate_size": model.experts.moe_ffn_hidden_size,
            "num_local_experts": model.experts.num_experts,
            "num_experts_per_tok": model.experts.moe_router_topk,
            "router_aux_loss_coef": model.balance.coefficients[0][1],
        }
    )


_BLOCK: Final = "block_sparse_moe"
_TABLE: Final[Table] = {
    **experts_table(_BLOCK, "w1", "w3", "w2"),
    f"{LAYERS}mlp.router.expert_bias": Same(f"model.layers.{{}}.{_BLOCK}.e_score_correction_bias"),
}

MINIMAX_M2: Final = llama_like(
    "minimax_m2",
    "MiniMaxM2",
    NORMS | QK_NORMS,
    _read,
    _write,
    more=_TABLE,
    aliases={"num_experts": "num_local_experts"},
)
