"""Whether two models are the same to their weights: fields without an effect do not count."""

from dataclasses import fields, replace
from typing import Any, Final

from megatron.model.config import ModelConfig, Pattern

OF_TRAINING: Final = (
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "label_smoothing",
    "z_loss_coeff",
    "mtp_loss_scaling_factor",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_in_fp32",
    "moe_router_in_fp64",
    "moe_router_bias_update_rate",
    "moe_router_force_load_balancing",
    "moe_input_jitter_eps",
    "moe_expert_capacity_factor",
    "moe_token_drop_policy",
)
"""Fields of training, on which the weights do not depend; a ``config.json`` may lack them."""


def same_layers(model: ModelConfig) -> ModelConfig:
    """Return an equal model whose patterns of layers are in a standard form, to be compared."""
    layers = range(model.num_layers)
    has_window = [model.is_local(i) for i in layers]
    local: dict[str, Any] = {
        "window_pattern": pattern_of([int(here) for here in has_window]),
        "no_rope_pattern": tuple(
            int(model.position_embedding_type == "rope" and not model.rotates(i)) for i in layers
        ),
    }
    has_experts = [model.has_experts(i) for i in layers]
    local["moe_layer_pattern"] = tuple(map(int, has_experts))
    if all(has_experts):
        local["ffn_hidden_size"] = model.moe_ffn_hidden_size
    if model.position_embedding_type == "rope":  # it turns any position
        local["max_position_embeddings"] = max(model.max_position_embeddings, model.seq_length)
    if model.rope_type == "dynamic":  # the original length is their number of positions
        local["max_position_embeddings"] = model.original_max_position_embeddings
    if not any(has_window):
        local |= {"window_size": None, "rotary_base_local": None}
    return replace(model, **local, **_idle_scaling(model))


def _idle_scaling(model: ModelConfig) -> dict[str, Any]:
    """Return defaults of the fields about RoPE's scaling that have no effect in a model."""
    idle = []
    if model.rope_type != "yarn":
        idle += ["beta_fast", "beta_slow", "mscale", "yarn_exact_range"]
    if model.rope_type == "rope":
        idle.append("original_max_position_embeddings")
    if model.rope_type != "yarn" and model.score_scale == model.softmax_scale:
        idle.append("mscale_all_dim")
        idle += ["rotary_scaling_factor"] if model.rope_type == "rope" else []
    return {field.name: field.default for field in fields(ModelConfig) if field.name in idle}


def pattern_of(entries: list[int]) -> Pattern:
    """Return a pattern of layers in the shortest form of the flags; empty: all layers.

    Args:
        entries: for every layer 1 (it has the window) or 0.
    """
    if all(entries):
        return ()
    period = entries.index(0) + 1
    repeated = [int((i + 1) % period != 0) for i in range(len(entries))]
    return tuple(entries[:period] if entries == repeated else entries)
