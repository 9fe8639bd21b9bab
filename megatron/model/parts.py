"""The parts of a transformer layer, built from the model's settings and the layer's index.

Every node of the settings goes to the part that it configures. Only a value that depends on several
nodes, or on the layer's place in the model, is formed here: scores, rotation, and whether the layer
has experts. Two layers with the same ``LayerKind`` are the same but for their weights.
"""

from dataclasses import dataclass

from torch import nn

from megatron.kernels.scores import Scores
from megatron.layers.alibi import alibi_slopes
from megatron.layers.attention import SelfAttention
from megatron.layers.experts.experts import Experts
from megatron.layers.latent_attention import LatentAttention
from megatron.layers.mlp import MLP
from megatron.layers.rope import Rotation
from megatron.layers.site import Site
from megatron.model.settings import ModelSettings


@dataclass(frozen=True)
class LayerKind:
    """How the layers of one model differ from each other.

    Attributes:
        has_experts: whether a mixture of experts stands in the place of the MLP.
        window: earlier positions that a position sees; ``None``: all positions.
        rotation: of queries and keys; ``None``: they are not rotated.
    """

    has_experts: bool
    window: int | None
    rotation: Rotation | None


def kind_of(model: ModelSettings, layer: int) -> LayerKind:
    """Return the kind of a layer, whose index in the whole model is ``layer``, from 0."""
    return LayerKind(
        model.experts.in_layer(layer), model.window_of(layer), rotation_of(model, layer)
    )


def rotation_of(model: ModelSettings, layer: int) -> Rotation | None:
    """Return the rotation of a layer's queries and keys; ``None``: they are not rotated.

    With ``rotary_base_local``, layers with a window have no scaling of positions or frequencies.
    """
    positions, latent = model.positions, model.latent
    if not positions.rotates(layer):
        return None
    base, local = positions.rotary_base, positions.rotary_base_local
    is_local = local is not None and model.attention.is_local(layer)
    is_latent = latent.multi_latent_attention
    return Rotation(
        latent.qk_pos_emb_head_dim if is_latent else model.attention.kv_channels,
        model.seq_length,
        positions.rotary_percent,
        local if local is not None and is_local else base,
        positions.rotary_interleaved or is_latent,
        interpolation=1 if is_local else positions.rotary_seq_len_interpolation_factor,
        scaling=None if is_local else model.rope_scaling.scaling(model.seq_length),
    )


def scores_of(model: ModelSettings, layer: int) -> Scores:
    """Return how products of queries and keys become scores in a layer."""
    heads, has_slopes = model.attention.num_attention_heads, model.positions.has_slopes
    return Scores(
        scale=model.score_scale,
        softcap=model.attention.attn_logit_softcapping,
        window=model.window_of(layer),
        slopes_a=alibi_slopes(heads) if has_slopes else (),
    )


def build_attention(model: ModelSettings, layer: int, site: Site) -> nn.Module:
    """Return the attention of a layer; it is called with the normed stream and the pass's data."""
    h, bias, scores = model.hidden_size, model.block.add_bias_linear, scores_of(model, layer)
    if model.latent.multi_latent_attention:
        return LatentAttention(
            model.latent, model.attention, h, site, bias=bias, norm=model.norm, scores=scores
        )
    return SelfAttention(model.attention, h, site, bias=bias, norm=model.norm, scores=scores)


def build_mlp(model: ModelSettings, layer: int, site: Site) -> nn.Module:
    """Return the MLP of a layer, or the mixture of experts that stands in its place."""
    h, bias, activation = model.hidden_size, model.block.add_bias_linear, model.mlp.function
    if model.experts.in_layer(layer):
        return Experts(model.experts, model.balance, h, activation, site, bias=bias)
    return MLP(h, model.mlp.ffn_hidden_size, site, activation=activation, bias=bias)
