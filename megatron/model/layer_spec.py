"""The parts of every layer of a model, as data derived from the configuration.

A ``LayerSpec`` holds the order of attention and MLP, the places of norms, and a spec for each part.
The part's spec builds the part. ``TransformerLayer`` follows its spec, so no layer needs to know
the flags. Different layers of one model may have different specs.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import nn

from megatron.kernels.scores import Scores
from megatron.layers.alibi import alibi_slopes
from megatron.layers.attention import AttentionShape, SelfAttention, Sinks
from megatron.layers.experts.experts import Experts, ExpertsShape
from megatron.layers.experts.router import RouterOptions
from megatron.layers.mlp import MLP, Activation
from megatron.layers.rope import RotaryEmbedding
from megatron.layers.rope_scaling import RopeScaling
from megatron.layers.site import Site
from megatron.model.latent_spec import latent_spec
from megatron.model.norm_spec import NormSpec, norm_spec
from megatron.model.settings import ModelSettings

Order = Literal["sequential", "parallel"]
"""Sequential: the MLP reads the stream after attention; parallel: both read the same input (as in
GPT-J and GPT-NeoX)."""


class PartSpec(Protocol):
    """The spec of attention, of an MLP, or of a mixture of experts: frozen data that builds a part.

    The part is called with the normed stream [b, u, h] and the ``ForwardPass``.
    """

    def build(self, site: Site) -> nn.Module:
        """Return the part for a site; its weights are not set yet."""
        ...


@dataclass(frozen=True)
class RotationSpec:
    """RoPE; see ``RotaryEmbedding``. Layers with equal specs share a table."""

    head_size: int
    seq_length: int
    percent: float
    base: int
    interleaved: bool = False
    interpolation: int = 1
    scaling: RopeScaling | None = None

    def build(self, site: Site) -> RotaryEmbedding:
        """Return the rotation for activations in the site's dtype."""
        return RotaryEmbedding(
            self.head_size,
            self.seq_length,
            self.percent,
            self.base,
            site.device,
            interleaved=self.interleaved,
            interpolation=self.interpolation,
            scaling=self.scaling,
            dtype=torch.promote_types(site.dtype, torch.float32),
            kernels=site.kernels,
        )


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention; see ``SelfAttention``.

    Attributes:
        shape: sizes.
        bias: biases in both projections.
        qkv_bias: a bias in the projection of queries, keys and values, even without ``bias``.
        dropout: probability of dropping an attention weight.
        qk_norm: norm of queries and keys; ``None``: no norm.
        qk_norm_across_heads: it is over the channels of all heads, not of each head.
        scores: how products of queries and keys become scores.
        sinks: the key without a value that takes part in every softmax; see ``SelfAttention``.
    """

    shape: AttentionShape
    bias: bool
    qkv_bias: bool
    dropout: float
    qk_norm: NormSpec | None
    qk_norm_across_heads: bool
    scores: Scores
    sinks: Sinks

    def build(self, site: Site) -> nn.Module:
        """See ``PartSpec``."""
        return SelfAttention(
            self.shape,
            site,
            bias=self.bias,
            qkv_bias=self.qkv_bias,
            dropout=self.dropout,
            qk_norms=self._qk_norms(site),
            scores=self.scores,
            sinks=self.sinks,
        )

    def _qk_norms(self, site: Site) -> tuple[nn.Module, nn.Module] | None:
        norm, shape = self.qk_norm, self.shape
        if norm is None:
            return None
        if not self.qk_norm_across_heads:
            return norm.build(shape.head_size, site), norm.build(shape.head_size, site)
        return norm.across(shape.num_heads * shape.head_size, site), norm.across(
            shape.num_groups * shape.head_size, site
        )


@dataclass(frozen=True)
class MLPSpec:
    """Two linear layers around an activation function; see ``MLP``."""

    hidden_size: int
    ffn_hidden_size: int
    activation: Activation
    bias: bool

    def build(self, site: Site) -> nn.Module:
        """See ``PartSpec``."""
        return MLP(
            self.hidden_size,
            self.ffn_hidden_size,
            site,
            activation=self.activation,
            bias=self.bias,
        )


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts in the place of an MLP; see ``Experts``."""

    shape: ExpertsShape
    router: RouterOptions
    activation: Activation

    def build(self, site: Site) -> nn.Module:
        """See ``PartSpec``."""
        return Experts(self.shape, self.router, self.activation, site)


@dataclass(frozen=True)
class LayerSpec:
    """One transformer layer.

    Attributes:
        order: whether attention and MLP are sequential or parallel.
        norm: spec of all norms over h in the layer.
        attention: reads the stream through ``input_layernorm``.
        mlp: reads the stream through a norm of its own, or through attention's norm.
        mlp_norm: whether the MLP has a norm of its own.
        norm_after_attention: whether attention's output passes a norm before it is added to the
            stream.
        norm_after_mlp: whether the MLP's output passes a norm before it is added to the stream.
        adds_to_normed: whether branches add to the norm's output, not to the norm's input.
        rotation: of queries and keys, if any.
        hidden_dropout: dropout on both branches.
    """

    order: Order
    norm: NormSpec
    attention: PartSpec
    mlp: PartSpec
    mlp_norm: bool
    norm_after_attention: bool
    norm_after_mlp: bool
    adds_to_normed: bool
    rotation: RotationSpec | None
    hidden_dropout: float


def layer_spec(config: ModelSettings, index: int) -> LayerSpec:
    """Return the spec of a layer of a model.

    Args:
        config: the model.
        index: of the layer in the whole model, from 0.
    """
    norm = norm_spec(config)
    return LayerSpec(
        order="parallel" if config.block.parallel_attn else "sequential",
        norm=norm,
        attention=_attention(config, index, norm),
        mlp=_mlp(config, index),
        mlp_norm=config.block.parallel_layernorm or not config.block.parallel_attn,
        norm_after_attention=config.block.post_self_attn_layernorm,
        norm_after_mlp=config.block.post_mlp_layernorm,
        adds_to_normed=config.block.apply_residual_connection_post_layernorm,
        rotation=_rotation(config, index),
        hidden_dropout=config.block.hidden_dropout,
    )


def _mlp(config: ModelSettings, index: int) -> PartSpec:
    if config.experts.in_layer(index):
        shape = ExpertsShape(
            config.hidden_size,
            config.experts.moe_ffn_hidden_size,
            config.experts.moe_shared_expert_intermediate_size,
            config.experts.moe_shared_expert_gate,
            config.block.add_bias_linear,
        )
        return ExpertsSpec(shape, config.router, config.mlp.function)
    return MLPSpec(
        config.hidden_size,
        config.mlp.ffn_hidden_size,
        config.mlp.function,
        config.block.add_bias_linear,
    )


def _attention(config: ModelSettings, index: int, norm: NormSpec) -> PartSpec:
    heads = config.attention.num_attention_heads
    scores = Scores(
        scale=config.score_scale,
        softcap=config.attention.attn_logit_softcapping,
        window=config.window_of(index),
        slopes_a=alibi_slopes(heads) if config.positions.position_embedding_type == "alibi" else (),
    )
    if config.latent.multi_latent_attention:
        return latent_spec(config, scores)
    return AttentionSpec(
        AttentionShape(
            config.hidden_size,
            heads,
            config.attention.num_query_groups,
            config.attention.kv_channels,
        ),
        bias=config.block.add_bias_linear,
        qkv_bias=config.attention.add_qkv_bias,
        dropout=config.attention.attention_dropout,
        qk_norm=norm if config.attention.qk_layernorm else None,
        qk_norm_across_heads=config.attention.qk_layernorm_across_heads,
        scores=scores,
        sinks=config.attention.softmax_type,
    )


def _rotation(config: ModelSettings, index: int) -> RotationSpec | None:
    """Return the rotation of a layer.

    With ``rotary_base_local``, layers with a window have no scaling of positions or frequencies.
    """
    if not config.positions.rotates(index):
        return None
    base, local = config.positions.rotary_base, config.positions.rotary_base_local
    is_local = local is not None and config.attention.is_local(index)
    is_latent = config.latent.multi_latent_attention
    return RotationSpec(
        config.latent.qk_pos_emb_head_dim if is_latent else config.attention.kv_channels,
        config.seq_length,
        config.positions.rotary_percent,
        local if local is not None and is_local else base,
        config.positions.rotary_interleaved or is_latent,
        interpolation=1 if is_local else config.positions.rotary_seq_len_interpolation_factor,
        scaling=None if is_local else config.rope_scaling.scaling(config.seq_length),
    )
