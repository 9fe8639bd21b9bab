"""The shape of a GPT model, as frozen data that every layer below the flags reads."""

from dataclasses import dataclass
from typing import Literal

import torch

from megatron.layers.attention import Sinks
from megatron.layers.experts.balance import Balance
from megatron.layers.experts.capacity import Capacity, DropPolicy
from megatron.layers.experts.router import RouterOptions, Score
from megatron.layers.mlp import Activation, QuickGeGLU, is_gated
from megatron.layers.rope_scaling import (
    DynamicScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
    length_factor,
)

PositionEmbedding = Literal["learned_absolute", "rope", "alibi", "none"]

RopeType = Literal["rope", "yarn", "dynamic"]
"""Scaling of RoPE's frequencies: none or Llama 3.1's, YaRN's, or dynamic NTK scaling."""

Pattern = tuple[int, ...]
"""A property of layers: 1 for layers that have it, 0 for others, repeated over all layers."""


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides the model's mathematics and the size of its parameters.

    All values are final: flags with derived defaults are resolved before.

    Attributes:
        num_layers: transformer layers of the whole model.
        hidden_size: width h of the residual stream.
        ffn_hidden_size: inner width of the MLP (of each of the two halves with ``swiglu``).
        num_attention_heads: query heads.
        num_query_groups: key/value heads; equal to ``num_attention_heads`` without GQA.
        kv_channels: width of one head; with multi-latent attention that of queries and keys.
        seq_length: tokens per sample s.
        max_position_embeddings: rows of the learned position table.
        vocab_size: real vocabulary entries V, before padding.
        position_embedding_type: ``learned_absolute`` adds a table on the first stage; ``rope``
            rotates queries and keys; ``alibi`` lowers scores with distance; ``none``: only the
            causal mask distinguishes positions.
        rotary_base: RoPE theta.
        rotary_percent: share of each head that is rotated.
        rotary_interleaved: RoPE pairs neighbouring channels, not channels of two halves.
        use_rope_scaling: RoPE's low frequencies are scaled down, as in Llama 3.1.
        rope_scaling_factor: divisor of the lowest frequencies.
        rope_type: which scaling the following fields are for.
        rotary_scaling_factor: divisor of the lowest frequencies by YaRN; factor of dynamic scaling.
        original_max_position_embeddings: tokens of a sample before the model was prepared for
            longer ones.
        beta_fast: turns in such a sample from which YaRN keeps a frequency.
        beta_slow: turns up to which YaRN divides a frequency in full.
        mscale: weight of log(factor) in the length that YaRN gives rotated channels.
        mscale_all_dim: the same weight in the divisor of that length.
        yarn_exact_range: the ends of YaRN's interpolation are not rounded to whole pairs.
        multi_latent_attention: queries, keys and values are made of narrow vectors.
        q_lora_rank: width of the one for queries; ``None``: queries are made of the input.
        kv_lora_rank: width of the one for keys and values.
        qk_head_dim: channels of a query or key that do not turn.
        qk_pos_emb_head_dim: channels that do.
        v_head_dim: channels of a value.
        latent_norm_epsilon: epsilon of the norms of the narrow vectors; ``None``: that of others.
        rotary_seq_len_interpolation_factor: divisor of RoPE's positions.
        rotary_base_local: RoPE theta of layers with a window, whose positions and frequencies are
            then not scaled; ``None``: they rotate like the other layers.
        no_rope_pattern: 1 for layers that do not rotate, 0 for others, repeated over the layers;
            empty: all layers rotate.
        window_size: number of earlier positions that a position sees; ``None``: all.
        window_pattern: 1 for layers with that window, 0 for layers that see all positions, repeated
            over the layers; empty: all layers have the window.
        softmax_scale: factor of the products of queries and keys; ``None``: 1/sqrt(kv_channels).
        softmax_type: a key without a value takes part in attention's softmax, with a learned score
            for every head (``learnable``), or with 0 (``off-by-one``); ``vanilla``: there is none.
        attn_logit_softcapping: c of ``c * tanh(score / c)`` in attention; 0 switches it off.
        normalization: ``LayerNorm`` or ``RMSNorm``.
        norm_epsilon: epsilon of every norm.
        apply_layernorm_1p: the parameter of a norm is its weight minus 1.
        post_self_attn_layernorm: attention's output passes a norm before it is added to the stream.
        post_mlp_layernorm: the MLP's output passes a norm before it is added to the stream.
        apply_residual_connection_post_layernorm: branches add to the norm's output, not to the
            norm's input.
        parallel_attn: attention and MLP read the same input, and both add to it.
        parallel_layernorm: with ``parallel_attn``, the MLP has a norm of its own.
        embed_layernorm: the word embeddings pass a norm.
        embedding_multiplier: factor of the word embeddings.
        swiglu: SiLU-gated MLP instead of GELU.
        geglu: GELU-gated MLP.
        quick_geglu: the same with ``x sigmoid(1.702 x)`` for GELU.
        activation_func_clamp_value: with ``quick_geglu``, limit of the gate and of the half that
            the gate multiplies; ``None``: there is no limit.
        glu_linear_offset: with ``quick_geglu``, number added to the half that the gate multiplies.
        squared_relu: MLP with relu(x)^2 instead of GELU.
        qk_layernorm: normalise queries and keys per head, or the vectors of latent attention.
        qk_layernorm_across_heads: normalise queries and keys over all heads at once.
        add_bias_linear: biases in the linear layers of the blocks.
        add_qkv_bias: a bias of queries, keys and values, also without ``add_bias_linear``.
        tie_embeddings: the output layer uses the input embedding's matrix.
        attention_dropout: dropout on attention probabilities.
        hidden_dropout: dropout on the embedding and on each residual branch.
        init_method_std: standard deviation of the normal initialisation.
        label_smoothing: share of the target mass spread evenly over the real vocabulary.
        z_loss_coeff: weight of the squared log-partition added to each token's loss.
        logit_softcap: c of ``c * tanh(logit / c)``; 0 switches it off.
        mtp_num_layers: depths D of multi-token prediction, each with a transformer layer; 0: none.
        mtp_loss_scaling_factor: weight, in the loss, of the mean of the depths' losses.
        num_experts: experts e of a layer with experts; 0: no layer has experts.
        moe_layer_pattern: 1 for layers with experts, 0 for others, repeated over the layers.
        moe_ffn_hidden_size: inner width of an expert.
        moe_router_topk: number k of experts that a token chooses.
        moe_router_score_function: how a router scores experts.
        moe_router_pre_softmax: the router's softmax is over all experts, not over the chosen ones.
        moe_router_num_groups: number of groups of experts.
        moe_router_group_topk: number of groups from which a token may choose experts.
        moe_router_group_best: number of a group's best experts whose scores add up to the
            score of the group; ``None``: ``moe_router_topk / moe_router_group_topk``.
        moe_router_topk_scaling_factor: factor of the weights of chosen experts.
        moe_router_load_balancing_type: what balances the experts; several may do so together.
        moe_aux_loss_coeff: coefficient of the balancing loss, or one for each type.
        moe_z_loss_coeff: coefficient of the router's squared log-partition.
        moe_router_in_fp32: the router multiplies in fp32.
        moe_router_in_fp64: the router multiplies and scores in fp64. (Checkpoints of earlier
            versions know the field above, so that there are two.)
        moe_router_enable_expert_bias: a bias of every expert joins the scores for the choice.
        moe_router_bias_update_rate: change of the bias after every iteration.
        moe_router_force_load_balancing: random logits take the place of the router's.
        moe_input_jitter_eps: largest relative noise on the router's input.
        moe_expert_capacity_factor: tokens that an expert takes, divided by the mean number of
            tokens of an expert; ``None``: it takes all.
        moe_token_drop_policy: which tokens a full expert keeps.
        moe_shared_expert_intermediate_size: inner width of the shared expert, which all tokens
            pass; 0: there is none.
        moe_shared_expert_gate: the shared expert has a gate.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    seq_length: int
    max_position_embeddings: int
    vocab_size: int
    position_embedding_type: PositionEmbedding = "learned_absolute"
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    rope_type: RopeType = "rope"
    rotary_scaling_factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    yarn_exact_range: bool = False
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 32
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    latent_norm_epsilon: float | None = None
    rotary_seq_len_interpolation_factor: int = 1
    rotary_base_local: int | None = None
    no_rope_pattern: Pattern = ()
    window_size: int | None = None
    window_pattern: Pattern = ()
    softmax_scale: float | None = None
    softmax_type: Sinks = "vanilla"
    attn_logit_softcapping: float = 0.0
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    norm_epsilon: float = 1e-5
    apply_layernorm_1p: bool = False
    post_self_attn_layernorm: bool = False
    post_mlp_layernorm: bool = False
    apply_residual_connection_post_layernorm: bool = False
    parallel_attn: bool = False
    parallel_layernorm: bool = False
    embed_layernorm: bool = False
    embedding_multiplier: float = 1.0
    swiglu: bool = False
    geglu: bool = False
    quick_geglu: bool = False
    activation_func_clamp_value: float | None = None
    glu_linear_offset: float = 0.0
    squared_relu: bool = False
    qk_layernorm: bool = False
    qk_layernorm_across_heads: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    tie_embeddings: bool = True
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    init_method_std: float = 0.02
    label_smoothing: float = 0.0
    z_loss_coeff: float = 0.0
    logit_softcap: float = 0.0
    mtp_num_layers: int = 0
    mtp_loss_scaling_factor: float = 0.1
    num_experts: int = 0
    moe_layer_pattern: Pattern = (1,)
    moe_ffn_hidden_size: int = 0
    moe_router_topk: int = 2
    moe_router_score_function: Score = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_num_groups: int = 1
    moe_router_group_topk: int = 1
    moe_router_group_best: int | None = None
    moe_router_topk_scaling_factor: float = 1.0
    moe_router_load_balancing_type: Balance | tuple[Balance, ...] = "aux_loss"
    moe_aux_loss_coeff: float | tuple[float, ...] = 0.0
    moe_z_loss_coeff: float = 0.0
    moe_router_in_fp32: bool = False
    moe_router_in_fp64: bool = False
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 1e-3
    moe_router_force_load_balancing: bool = False
    moe_input_jitter_eps: float = 0.0
    moe_expert_capacity_factor: float | None = None
    moe_token_drop_policy: DropPolicy = "probs"
    moe_shared_expert_intermediate_size: int = 0
    moe_shared_expert_gate: bool = False

    @property
    def embeds_at_both_ends(self) -> bool:
        """Whether the last stage needs the embedding's matrix too."""
        return self.tie_embeddings or self.mtp_num_layers > 0

    @property
    def activation(self) -> Activation:
        """The MLP's activation function."""
        if self.swiglu:
            return "swiglu"
        if self.geglu:
            return "geglu"
        if self.quick_geglu:
            return QuickGeGLU(self.activation_func_clamp_value, self.glu_linear_offset)
        return "squared_relu" if self.squared_relu else "gelu"

    @property
    def gated_mlp(self) -> bool:
        """Whether the MLP's first layer has two halves."""
        return is_gated(self.activation)

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts in the place of its MLP.

        Args:
            layer: index in the whole model, from 0.
        """
        pattern = self.moe_layer_pattern
        return self.num_experts > 0 and bool(pattern[layer % len(pattern)])

    @property
    def router(self) -> RouterOptions:
        """How tokens choose experts."""
        types, coefficients = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        if isinstance(types, str):
            types = (types,)
        if isinstance(coefficients, float):
            coefficients = (coefficients,) * len(types)
        factor = self.moe_expert_capacity_factor
        narrow = torch.float32 if self.moe_router_in_fp32 else None
        return RouterOptions(
            self.num_experts,
            self.moe_router_topk,
            self.moe_router_score_function,
            self.moe_router_pre_softmax,
            self.moe_router_num_groups,
            self.moe_router_group_topk,
            self.moe_router_topk_scaling_factor,
            tuple(zip(types, coefficients, strict=True)),
            self.moe_z_loss_coeff,
            torch.float64 if self.moe_router_in_fp64 else narrow,
            self.moe_router_enable_expert_bias,
            self.moe_router_bias_update_rate,
            self.moe_router_force_load_balancing,
            self.moe_input_jitter_eps,
            None if factor is None else Capacity(factor, self.moe_token_drop_policy),
            linear_bias=self.add_bias_linear,
            group_best=self.moe_router_group_best,
        )

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """How RoPE's frequencies are scaled, in layers that scale them."""
        original = self.original_max_position_embeddings
        if self.rope_type == "yarn":
            return YarnScaling(
                self.rotary_scaling_factor,
                original,
                self.beta_fast,
                self.beta_slow,
                self.mscale,
                self.mscale_all_dim,
                self.yarn_exact_range,
            )
        if self.rope_type == "dynamic":
            return DynamicScaling(self.rotary_scaling_factor, original, self.seq_length)
        return Llama3Scaling(self.rope_scaling_factor) if self.use_rope_scaling else None

    @property
    def score_scale(self) -> float | None:
        """Factor of the products of queries and keys; ``None``: 1 / root of their channels.

        With YaRN, multi-latent attention lengthens all channels of queries and keys, and other
        attention only the channels that turn.
        """
        if self.softmax_scale is not None or not self.multi_latent_attention:
            return self.softmax_scale
        length = length_factor(self.rotary_scaling_factor, self.mscale_all_dim)
        return None if length == 1 else length**2 * float(self.kv_channels) ** -0.5

    def is_local(self, layer: int) -> bool:
        """Return whether a layer has the window.

        Args:
            layer: index in the whole model, from 0.
        """
        pattern = self.window_pattern or (1,)
        return self.window_size is not None and bool(pattern[layer % len(pattern)])

    def window_of(self, layer: int) -> int | None:
        """Return how many earlier positions a position sees in a layer; ``None``: all positions.

        Args:
            layer: index in the whole model, from 0.
        """
        size = self.window_size
        hides = size is not None and size < self.seq_length - 1 and self.is_local(layer)
        return size if hides else None

    def rotates(self, layer: int) -> bool:
        """Return whether queries and keys of a layer are rotated.

        Args:
            layer: index in the whole model, from 0.
        """
        pattern = self.no_rope_pattern or (0,)
        return self.position_embedding_type == "rope" and not pattern[layer % len(pattern)]
