"""Whether two models are the same to their weights: fields without an effect do not count."""

from typing import Any, Final

from megatron.flags.tree import defaults_of
from megatron.layers.settings import RopeScalingSettings
from megatron.model.settings import ModelSettings

OF_TRAINING: Final = (
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "embedding_init_method_std",
    "output_layer_init_method_std",
    "label_smoothing",
    "z_loss_coeff",
    "mtp_loss_scaling_factor",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_dtype",
    "moe_router_bias_update_rate",
    "moe_router_force_load_balancing",
    "moe_input_jitter_eps",
    "moe_expert_capacity_factor",
    "moe_token_drop_policy",
)
"""Fields of training, on which the weights do not depend; a ``config.json`` may lack them."""


def same_layers(model: ModelSettings) -> ModelSettings:
    """Return an equal model in which values without an effect are the same, to be compared."""
    layers, positions, scaling = range(model.num_layers), model.positions, model.rope_scaling
    kind = positions.position_embedding_type
    idle: dict[str, Any] = {}
    if model.block.add_bias_linear:
        idle |= {"add_qkv_bias": False, "add_proj_bias": False}
    if all(map(model.experts.in_layer, layers)):
        idle["ffn_hidden_size"] = model.experts.moe_ffn_hidden_size
    if kind != "learned_absolute":  # there is no last position
        idle["max_position_embeddings"] = max(positions.max_position_embeddings, model.seq_length)
    if kind != "rope":
        idle["no_rope_freq"] = None
    if scaling.rope_type == "dynamic":  # the original length is their number of positions
        idle["max_position_embeddings"] = scaling.original_max_position_embeddings
    if not any(map(model.attention.is_local, layers)):
        idle |= dict.fromkeys(("window_size", "window_attn_skip_freq", "rotary_base_local"))
    return model.replaced(**idle, **_idle_scaling(model))


def _idle_scaling(model: ModelSettings) -> dict[str, Any]:
    """Return defaults of the fields about RoPE's scaling that have no effect in a model."""
    kind, idle = model.rope_scaling.rope_type, list[str]()
    if kind != "yarn":
        idle += ["beta_fast", "beta_slow", "mscale", "yarn_exact_range"]
    if kind == "rope":
        idle.append("original_max_position_embeddings")
    if kind != "yarn" and model.score_scale == model.attention.softmax_scale:
        idle.append("mscale_all_dim")
        idle += ["rotary_scaling_factor"] if kind == "rope" else []
    return {name: defaults_of(RopeScalingSettings)[name] for name in idle}
