"""DeepSeek-V2 and V3, and models of their form such as Moonlight: latents and experts.

Sizes have the names of the papers. Queries are formed from a vector of ``q_lora_rank`` channels,
keys and values from a vector of ``kv_lora_rank`` channels. The first ``first_k_dense_replace``
layers have an MLP in place of experts. In V3 a bias of every expert joins its score for the choice,
and the layers of multi-token prediction follow the last layer. Beside each of them V3 stores copies
of the embedding and of the output layer.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from megatron.checkpoint.foreign.family import Values, llama_like
from megatron.checkpoint.foreign.fields import MOST_LAYERS, Fields
from megatron.checkpoint.foreign.layouts import (
    DEPTHS,
    ForeignError,
    Halves,
    Layout,
    Same,
    Table,
)
from megatron.checkpoint.foreign.llama import NORMS, common_fields, written_fields
from megatron.checkpoint.foreign.mixtures import experts_table
from megatron.model.config import ModelConfig
from megatron.model.ownership import LAYERS, OUTPUT_LAYER, WORD_EMBEDDINGS
from megatron.parallel.box import Shape


class SharedByDepths(Layout):
    """A tensor of which DeepSeek's files store a copy for every depth of multi-token prediction.

    Args:
        name: name of the tensor in those files.
        copy: name of a copy; ``{}`` stands for the number of the depth's layer.
    """

    def __init__(self, name: str, copy: str) -> None:
        super().__init__(name)
        self._copy = copy

    def names_in(self, model: ModelConfig) -> tuple[str, ...]:
        """As in ``Layout``."""
        return self.names + self.copies_in(model)

    def copies_in(self, model: ModelConfig) -> tuple[str, ...]:
        """As in ``Layout``."""
        first = model.num_layers
        return tuple(self._copy.format(first + depth) for depth in range(model.mtp_num_layers))

    def shapes(self, ours: Shape, model: ModelConfig) -> list[Shape]:
        """As in ``Layout``."""
        return [ours] * (1 + model.mtp_num_layers)

    def join(self, theirs: Sequence[Tensor], model: ModelConfig) -> Tensor:
        """As in ``Layout``."""
        first, *copies = theirs
        if any(not torch.equal(_bits(first), _bits(copy)) for copy in copies):
            raise ForeignError(
                f"{self._copy.format('*')} differs from {self.names[0]}, and this program has one "
                "matrix for both"
            )
        return first

    def split(self, ours: Tensor, model: ModelConfig) -> list[Tensor]:
        """As in ``Layout``."""
        return [ours] * (1 + model.mtp_num_layers)


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, of which also NaN are equal."""
    return tensor.contiguous().view(torch.uint8)


_LATENT_EPSILON: Final = 1e-6
"""Epsilon of the norms of latents, which ``rms_norm_eps`` does not change."""


def _read_common(c: Fields) -> Values:
    """Return the fields of our model that both versions name alike."""
    c.check("attention_bias", (False,), False)
    c.check("moe_layer_freq", (1,), 1)
    plain, turned = c.whole("qk_nope_head_dim", 128), c.whole("qk_rope_head_dim", 64)
    heads = c.whole("num_attention_heads")
    c.check("num_key_value_heads", (heads,), heads)
    model = common_fields(Fields({**c.all, "head_dim": turned}, c.origin))
    layers, dense = model["num_layers"], c.any("first_k_dense_replace", 0)
    if type(dense) is not int or not 0 <= dense < layers:
        raise c.fault("first_k_dense_replace", f"a whole number below {layers}")
    width, shared = c.whole("moe_intermediate_size"), c.whole("n_shared_experts")
    return model | {
        "kv_channels": plain + turned,
        "multi_latent_attention": True,
        "q_lora_rank": c.whole_or_none("q_lora_rank", 1536),
        "kv_lora_rank": c.whole("kv_lora_rank", 512),
        "qk_head_dim": plain,
        "qk_pos_emb_head_dim": turned,
        "v_head_dim": c.whole("v_head_dim", 128),
        "qk_layernorm": True,
        "latent_norm_epsilon": (
            None if model["norm_epsilon"] == _LATENT_EPSILON else _LATENT_EPSILON
        ),
        "num_experts": c.whole("n_routed_experts"),
        "moe_layer_pattern": (0,) * dense + (1,) * (layers - dense),
        "moe_ffn_hidden_size": width,
        "moe_router_topk": c.whole("num_experts_per_tok"),
        "moe_router_topk_scaling_factor": c.number("routed_scaling_factor", 1.0),
        "moe_aux_loss_coeff": c.number("aux_loss_alpha", 0.0),
        "moe_shared_expert_intermediate_size": width * shared,
    }


def _read_v2(c: Fields) -> Values:
    c.check("scoring_func", ("softmax",), "softmax")
    c.check("mlp_bias", (False,), False)
    c.check("norm_topk_prob", (False,), False)
    c.check("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    found = _read_common(c) | {"moe_router_pre_softmax": True}
    if c.any("topk_method", "greedy") == "greedy":
        return found
    return found | _groups(c, found["moe_router_topk"], best=1)


def _read_v3(c: Fields) -> Values:
    c.check("scoring_func", ("sigmoid",), "sigmoid")
    c.check("topk_method", ("noaux_tc",), "noaux_tc")
    c.check("norm_topk_prob", (True,), True)
    c.check("rope_interleave", (True,), True)
    found = _read_common(c) | {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "mtp_num_layers": _depths(c),
    }
    if found["moe_router_topk"] == 1:
        raise c.fault("num_experts_per_tok", "more than 1, which this program needs here")
    return found | _groups(c, found["moe_router_topk"], best=2)


def _depths(c: Fields) -> int:
    """Return the number of layers of multi-token prediction."""
    depths = c.any("num_nextn_predict_layers", 0)
    if type(depths) is not int or not 0 <= depths <= MOST_LAYERS:
        raise c.fault("num_nextn_predict_layers", f"a whole number up to {MOST_LAYERS}")
    return depths


def _groups(c: Fields, topk: int, best: int) -> Values:
    """Return the fields about groups of experts, which are as good as their ``best`` experts."""
    groups, chosen = c.whole("n_group", 1), c.whole("topk_group", 1)
    if groups == 1:
        return {}
    return {
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen,
        "moe_router_group_best": None if topk == best * chosen else best,
    }


def _write_common(model: ModelConfig) -> Values:
    width = model.moe_ffn_hidden_size
    has_experts = [model.has_experts(layer) for layer in range(model.num_layers)]
    return written_fields(model) | {
        "head_dim": model.qk_pos_emb_head_dim,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_head_dim,
        "qk_rope_head_dim": model.qk_pos_emb_head_dim,
        "v_head_dim": model.v_head_dim,
        "n_routed_experts": model.num_experts,
        "n_shared_experts": model.moe_shared_expert_intermediate_size // max(width, 1),
        "first_k_dense_replace": has_experts.index(True) if any(has_experts) else 0,
        "moe_intermediate_size": width,
        "num_experts_per_tok": model.moe_router_topk,
        "n_group": model.moe_router_num_groups,
        "topk_group": model.moe_router_group_topk,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor,
    }


def _write_v2(model: ModelConfig) -> Values:
    method = "greedy" if model.moe_router_num_groups == 1 else "group_limited_greedy"
    return _write_common(model) | {"topk_method": method, "norm_topk_prob": False}


def _write_v3(model: ModelConfig) -> Values:
    return _write_common(model) | {
        "norm_topk_prob": True,
        "rope_interleave": True,
        "num_nextn_predict_layers": model.mtp_num_layers,
    }


_ATTENTION: Final = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "q_layernorm": "q_a_layernorm",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
}
"""Their names of the parts of attention, by our names."""

_SHARED: Final = "model.layers.{}.mlp.shared_experts"
_TABLE: Final[Table] = {
    **experts_table("mlp", "gate_proj", "up_proj", "down_proj"),
    **{
        f"{LAYERS}self_attention.{ours}.weight": Same(
            f"model.layers.{{}}.self_attn.{theirs}.weight"
        )
        for ours, theirs in _ATTENTION.items()
    },
    f"{LAYERS}mlp.shared_experts.linear_fc1.weight": Halves(
        f"{_SHARED}.gate_proj.weight", f"{_SHARED}.up_proj.weight"
    ),
    f"{LAYERS}mlp.shared_experts.linear_fc2.weight": Same(f"{_SHARED}.down_proj.weight"),
}

DEEPSEEK_V2: Final = llama_like(
    "deepseek_v2", "DeepseekV2", NORMS, _read_v2, _write_v2, more=_TABLE
)
_JOINED: Final = ("enorm", "hnorm", "eh_proj")
"""Parts of a depth of multi-token prediction that have the same name in both programs."""

_V3: Final[Table] = {
    **_TABLE,
    f"{LAYERS}mlp.router.expert_bias": Same("model.layers.{}.mlp.gate.e_score_correction_bias"),
    WORD_EMBEDDINGS: SharedByDepths(
        "model.embed_tokens.weight", "model.layers.{}.embed_tokens.weight"
    ),
    OUTPUT_LAYER: SharedByDepths("lm_head.weight", "model.layers.{}.shared_head.head.weight"),
    **{f"{DEPTHS}{name}.weight": Same(f"model.layers.{{}}.{name}.weight") for name in _JOINED},
    f"{DEPTHS}final_layernorm.weight": Same("model.layers.{}.shared_head.norm.weight"),
}
DEEPSEEK_V3: Final = llama_like(
    "deepseek_v3",
    "DeepseekV3",
    NORMS,
    _read_v3,
    _write_v3,
    more=_V3,
)
