"""Granite: Llama with factors of the embedding, of scores, of both branches, and of the logits.

In the mixture, files hold the experts of a layer in one tensor.
"""

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from megatron.checkpoint.foreign.family import (
    Values,
    attention_biases,
    biases,
    llama_like,
    written_biases,
)
from megatron.checkpoint.foreign.fields import Fields
from megatron.checkpoint.foreign.layouts import Layout, Same, Table
from megatron.checkpoint.foreign.llama import NORMS, common_fields, written_fields
from megatron.model.ownership import LAYERS
from megatron.model.settings import ModelSettings
from megatron.parallel.box import Shape


class _Joined(Layout):
    """One tensor [e, o, i] of all experts; in ours the experts lie one below the other."""

    def shapes(self, ours: Shape, model: ModelSettings) -> list[Shape]:
        """As in ``Layout``."""
        experts = model.experts.num_experts
        return [(experts, ours[0] // experts, *ours[1:])]

    def join(self, theirs: Sequence[Tensor], model: ModelSettings) -> Tensor:
        """As in ``Layout``."""
        return theirs[0].flatten(0, 1)

    def split(self, ours: Tensor, model: ModelSettings) -> list[Tensor]:
        """As in ``Layout``."""
        return [ours.unflatten(0, (model.experts.num_experts, -1))]


def _read_factors(c: Fields, common: Values) -> Values:
    scale = c.positive("attention_multiplier", 1.0)
    return {
        "embedding_multiplier": c.positive("embedding_multiplier", 1.0),
        "softmax_scale": None if scale == common["kv_channels"] ** -0.5 else scale,
        "residual_multiplier": c.positive("residual_multiplier", 1.0),
        "logit_multiplier": 1 / c.positive("logits_scaling", 1.0),
    }


def _written_factors(model: ModelSettings) -> Values:
    scale = model.attention.softmax_scale
    return {
        "embedding_multiplier": model.vocabulary.embedding_multiplier,
        "attention_multiplier": model.attention.kv_channels**-0.5 if scale is None else scale,
        "residual_multiplier": model.block.residual_multiplier,
        "logits_scaling": 1 / model.vocabulary.logit_multiplier,
    }


def _read(c: Fields) -> Values:
    common = common_fields(c)
    return common | biases(c) | _read_factors(c, common)


def _write(model: ModelSettings) -> Values:
    return written_fields(model) | written_biases(model) | _written_factors(model)


def _read_moe(c: Fields) -> Values:
    common = common_fields(c)
    return (
        common
        | attention_biases(c)
        | _read_factors(c, common)
        | {
            "num_experts": c.whole("num_local_experts", 8),
            "moe_ffn_hidden_size": common["ffn_hidden_size"],
            "moe_router_topk": c.whole("num_experts_per_tok", 2),
            "moe_aux_loss_coeff": (c.number("router_aux_loss_coef", 0.001),),
        }
    )


def _write_moe(model: ModelSettings) -> Values:
    bias = written_biases(model)["attention_bias"]
    return (
        written_fields(model)
        | _written_factors(model)
        | {
            "attention_bias": bias,
            "intermediate_size": model.experts.moe_ffn_hidden_size,
            "num_local_experts": model.experts.num_experts,
            "num_experts_per_tok": model.experts.moe_router_topk,
            "router_aux_loss_coef": model.balance.coefficients[0][1],
        }
    )


_BLOCK: Final = "model.layers.{}.block_sparse_moe"
_EXPERTS: Final[Table] = {
    f"{LAYERS}mlp.router.weight": Same(f"{_BLOCK}.router.layer.weight"),
    f"{LAYERS}mlp.experts.linear_fc1.weight": _Joined(f"{_BLOCK}.input_linear.weight"),
    f"{LAYERS}mlp.experts.linear_fc2.weight": _Joined(f"{_BLOCK}.output_linear.weight"),
}

GRANITE: Final = llama_like("granite", "Granite", NORMS, _read, _write)
GRANITE_MOE: Final = llama_like(
    "granitemoe", "GraniteMoe", NORMS, _read_moe, _write_moe, more=_EXPERTS
)
