"""DeepSeek-V2 and V3, and models of their form such as Moonlight: latents and experts.

Sizes have the names of the papers. Queries are formed from a vector of ``q_lora_rank`` channels,
keys and values from a vector of ``kv_lora_rank`` channels. The first ``first_k_dense_replace``
layers have an MLP in place of experts. In V3 a bias of every expert joins its score for the choice,
and the layers of multi-token prediction follow the last layer. Beside each of them V3 stores copies
of the embedding and of the output layer.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from torch import Tensor

from megatron.checkpoint.foreign.derived import same_numbers
from megatron.checkpoint.foreign.family import Values, check_widths, llama_like
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
from megatron.checkpoint.foreign.rotation import read_latent_rotation
from megatron.layers.patterns import LayerPattern
from megatron.model.ownership import LAYERS, OUTPUT_LAYER, WORD_EMBEDDINGS
from megatron.model.settings import ModelSettings
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

    def names_in(self, model: ModelSettings) -> tuple[str, ...]:
        """As in ``Layout``."""
        return self.names + self.copies_in(model)

    def copies_in(self, model: ModelSettings) -> tuple[str, ...]:
        """As in ``Layout``."""
        first = model.num_layers
        return tuple(
            self._copy.format(first + depth) for depth in range(model.further.mtp_num_layers)
        )

    def shapes(self, ours: Shape, model: ModelSettings) -> list[Shape]:
        """As in ``Layout``."""
        return [ours] * (1 + model.further.mtp_num_layers)

    def join(self, theirs: Sequence[Tensor], model: ModelSettings) -> Tensor:
        """As in ``Layout``."""
        first, *copies = theirs
        if any(not same_numbers(first, copy) for copy in copies):
            raise ForeignError(
                f"{self._copy.format('*')} differs from {self.names[0]}, and this program has one "
                "matrix for both"
            )
        return first

    def split(self, ours: Tensor, model: ModelSettings) -> list[Tensor]:
        """As in ``Layout``."""
        return [ours] * (1 + model.further.mtp_num_layers)


_LATENT_EPSILON: Final = 1e-6
"""Epsilon of the norms of latents, which ``rms_norm_eps`` does not change."""


def _read_common(c: Fields) -> Values:
    """Return the fields of our model that both versions name alike."""
    c.check("attention_bias", (False,), False)
    c.check("moe_layer_freq", (1,), 1)
    plain, turned = c.whole("qk_nope_head_dim", 128), c.whole("qk_rope_head_dim", 64)
    heads = c.whole("num_attention_heads")
    if c.whole("num_key_value_heads", heads) != heads:
        raise c.fault("num_key_value_heads", f"num_attention_heads, {heads}")
    if turned % 2:
        raise c.fault("qk_rope_head_dim", "an even number: RoPE turns pairs of channels")
    model = common_fields(Fields({**c.all, "head_dim": turned}, c.origin))
    model |= read_latent_rotation(c)
    return (
        model
        | read_experts(c, model["num_layers"])
        | {
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
        }
    )


def read_experts(c: Fields, layers: int) -> Values:
    """Return the fields of our model about experts, without their groups.

    Args:
        c: fields of ``config.json``.
        layers: number of layers, of which the first ones may have an MLP.
    """
    dense = c.any("first_k_dense_replace", 0)
    if type(dense) is not int or not 0 <= dense < layers:
        raise c.fault("first_k_dense_replace", f"a whole number below num_hidden_layers {layers}")
    width, shared = c.whole("moe_intermediate_size"), c.whole("n_shared_experts")
    return {
        "num_experts": c.whole("n_routed_experts"),
        "moe_layer_freq": LayerPattern(listed=(0,) * dense + (1,) * (layers - dense)),
        "moe_ffn_hidden_size": width,
        "moe_router_topk": c.whole("num_experts_per_tok"),
        "moe_router_topk_scaling_factor": c.positive("routed_scaling_factor", 1.0),
        "moe_aux_loss_coeff": (c.number("aux_loss_alpha", 0.0),),
        "moe_shared_expert_intermediate_size": width * shared,
    }


def read_biased_choice(c: Fields) -> Values:
    """Return the fields of our model about V3's scores: sigmoids, and a bias for the choice."""
    c.check("scoring_func", ("sigmoid",), "sigmoid")
    c.check("topk_method", ("noaux_tc",), "noaux_tc")
    c.check("norm_topk_prob", (True,), True)
    return {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


_V3_DEFAULTS: Final[Values] = {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5}
"""Values of fields that a ``config.json`` of V3 leaves out, where V2 has others."""


def _read_v2(c: Fields) -> Values:
    check_widths(c)
    c.check("scoring_func", ("softmax",), "softmax")
    c.check("mlp_bias", (False,), False)
    c.check("norm_topk_prob", (False,), False)
    c.check("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    found = _read_common(c) | {"moe_router_pre_softmax": True}
    if c.any("topk_method", "greedy") == "greedy":
        return found
    return found | read_groups(c, found, best=1, groups=1, chosen=1)


def _read_v3(c: Fields) -> Values:
    c.check("rope_interleave", (True,), True)
    turned = c.whole("qk_rope_head_dim", 64)
    if c.whole("head_dim", turned) != turned:
        raise c.fault("head_dim", f"qk_rope_head_dim {turned}")
    found = _read_common(Fields(_V3_DEFAULTS | dict(c.all), c.origin))
    found |= read_biased_choice(c) | {"mtp_num_layers": read_depths(c)}
    return found | read_groups(c, found, best=2, groups=8, chosen=4)


def read_depths(c: Fields) -> int:
    """Return the number of layers of multi-token prediction."""
    depths = c.any("num_nextn_predict_layers", 0)
    if type(depths) is not int or not 0 <= depths <= MOST_LAYERS:
        raise c.fault("num_nextn_predict_layers", f"a whole number up to {MOST_LAYERS}")
    return depths


def read_groups(c: Fields, model: Values, *, best: int, groups: int, chosen: int) -> Values:
    """Return the fields of our model about groups of experts.

    Args:
        c: fields of ``config.json``.
        model: fields of our model about experts.
        best: the experts whose scores make a group's score.
        groups: default of the number of groups.
        chosen: default of the number of groups that a token chooses from.

    Raises:
        ForeignError: no token can choose so many experts from so many groups.
    """
    groups, chosen = c.whole("n_group", groups), c.whole("topk_group", chosen)
    experts, topk = model["num_experts"], model["moe_router_topk"]
    if experts % groups or best > experts // groups:
        raise c.fault(
            "n_group", f"a divisor of n_routed_experts {experts} with groups of {best} or more"
        )
    if chosen > groups:
        raise c.fault("topk_group", f"at most n_group {groups}")
    if topk % chosen or topk > chosen * (experts // groups):
        raise ForeignError(
            f"{c.origin}: num_experts_per_tok {topk} cannot come from topk_group {chosen} groups "
            f"of {experts // groups} experts (n_routed_experts {experts}, n_group {groups}), as "
            "many from each, which this program needs"
        )
    if groups == 1:
        return {}
    return {
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen,
        "moe_router_group_best": None if topk == best * chosen else best,
    }


def _write_common(model: ModelSettings) -> Values:
    return (
        written_fields(model)
        | written_experts(model)
        | {
            "head_dim": model.latent.qk_pos_emb_head_dim,
            "q_lora_rank": model.latent.q_lora_rank,
            "kv_lora_rank": model.latent.kv_lora_rank,
            "qk_nope_head_dim": model.latent.qk_head_dim,
            "qk_rope_head_dim": model.latent.qk_pos_emb_head_dim,
            "v_head_dim": model.latent.v_head_dim,
        }
    )


def written_experts(model: ModelSettings) -> Values:
    """Return the fields of ``config.json`` about experts."""
    width = model.experts.moe_ffn_hidden_size
    has_experts = [model.experts.in_layer(layer) for layer in range(model.num_layers)]
    return {
        "n_routed_experts": model.experts.num_experts,
        "n_shared_experts": model.experts.moe_shared_expert_intermediate_size // max(width, 1),
        "first_k_dense_replace": has_experts.index(True) if any(has_experts) else 0,
        "moe_intermediate_size": width,
        "num_experts_per_tok": model.experts.moe_router_topk,
        "n_group": model.experts.moe_router_num_groups or 1,
        "topk_group": model.experts.moe_router_group_topk or 1,
        "routed_scaling_factor": model.experts.moe_router_topk_scaling_factor,
    }


def _write_v2(model: ModelSettings) -> Values:
    method = "greedy" if model.experts.moe_router_num_groups is None else "group_limited_greedy"
    return _write_common(model) | {"topk_method": method, "norm_topk_prob": False}


def _write_v3(model: ModelSettings) -> Values:
    return _write_common(model) | {
        "norm_topk_prob": True,
        "rope_interleave": True,
        "num_nextn_predict_layers": model.further.mtp_num_layers,
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
_EXPERTS: Final[Table] = {
    **experts_table("mlp", "gate_proj", "up_proj", "down_proj"),
    f"{LAYERS}mlp.shared_experts.linear_fc1.weight": Halves(
        f"{_SHARED}.gate_proj.weight", f"{_SHARED}.up_proj.weight"
    ),
    f"{LAYERS}mlp.shared_experts.linear_fc2.weight": Same(f"{_SHARED}.down_proj.weight"),
}
_TABLE: Final[Table] = {
    **_EXPERTS,
    **{
        f"{LAYERS}self_attention.{ours}.weight": Same(
            f"model.layers.{{}}.self_attn.{theirs}.weight"
        )
        for ours, theirs in _ATTENTION.items()
    },
}

DEEPSEEK_V2: Final = llama_like(
    "deepseek_v2",
    "DeepseekV2",
    NORMS,
    _read_v2,
    _write_v2,
    more=_TABLE,
    aliases={"num_experts": "n_routed_experts"},
)
_JOINED: Final = ("enorm", "hnorm", "eh_proj")
"""Parts of a depth of multi-token prediction that have the same name in both programs."""

V3_EXPERTS: Final[Table] = {
    **_EXPERTS,
    f"{LAYERS}mlp.router.expert_bias": Same("model.layers.{}.mlp.gate.e_score_correction_bias"),
    WORD_EMBEDDINGS: SharedByDepths(
        "model.embed_tokens.weight", "model.layers.{}.embed_tokens.weight"
    ),
    OUTPUT_LAYER: SharedByDepths("lm_head.weight", "model.layers.{}.shared_head.head.weight"),
    **{f"{DEPTHS}{name}.weight": Same(f"model.layers.{{}}.{name}.weight") for name in _JOINED},
    f"{DEPTHS}final_layernorm.weight": Same("model.layers.{}.shared_head.norm.weight"),
}
"""V3's layouts of experts and of multi-token prediction."""

DEEPSEEK_V3: Final = llama_like(
    "deepseek_v3",
    "DeepseekV3",
    NORMS,
    _read_v3,
    _write_v3,
    more={**_TABLE, **V3_EXPERTS},
    aliases={
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
)
KIMI_K2: Final = replace(DEEPSEEK_V3, name="kimi_k2", model_type="kimi_k2")
"""Kimi K2: a model of DeepSeek-V3's form under a name of its own."""
