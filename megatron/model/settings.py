"""The settings of a model: its shape, and a node for every kind of part.

A name alone says where a value stands, as ``megatron.flags.tree`` tells. Checkpoints keep the
values by name.
"""

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from megatron.flags.declare import flag, required, spelled, spells
from megatron.flags.ranges import CAP_OR_OFF, DEPTH, FACTOR, LENGTH, SHARE, WEIGHT, WIDTH, Range
from megatron.flags.tree import changed, declared_in, flags_of, made
from megatron.layers.experts.settings import BalanceSettings, ExpertSettings
from megatron.layers.patterns import LayerPattern
from megatron.layers.settings import (
    AttentionSettings,
    LatentAttentionSettings,
    MLPSettings,
    NormSettings,
    PositionSettings,
    RopeScalingSettings,
)
from megatron.model.width_settings import WidthSettings


@dataclass(frozen=True)
class ShapeSettings:
    """The model's shape."""

    # fmt: off
    num_layers: int = required("Transformer layers.", DEPTH)
    hidden_size: int = required("Width of the model.", WIDTH)
    seq_length: int = required("Tokens per sample.", LENGTH)
    init_method_std: float = flag(0.02, "Standard deviation of the initial weights.", Range(0, 10))
    embedding_init_method_std: float | None = flag(None,
        "Standard deviation of the initial embeddings of words and positions.", Range(0, 10),
        unset="--init-method-std")
    output_layer_init_method_std: float | None = flag(None,
        "Standard deviation of the initial weights of an output layer with a matrix of its own.",
        Range(0, 10), unset="--init-method-std, or that of embeddings with --use-mup",
        idle_without="--untie-embeddings-and-output-weights")
    # fmt: on


@dataclass(frozen=True)
class BlockSettings:
    """How attention, MLP and norms make a layer."""

    # fmt: off
    add_bias_linear: bool = spelled(True,
        spells("--disable-bias-linear", False, "No biases in the linear layers."))
    hidden_dropout: float = flag(0.1, "Dropout on the embedding and on the residual branches.",
        SHARE)
    post_self_attn_layernorm: bool = flag(False,
        "Normalise attention's output before it joins the residual stream.")
    post_mlp_layernorm: bool = flag(False,
        "Normalise the MLP's output before it joins the residual stream.")
    apply_residual_connection_post_layernorm: bool = flag(False,
        "Add the output of attention, and of the MLP, to the output of the norm before it, not to "
        "that norm's input.")
    pre_layernorm: bool = spelled(True,
        spells("--no-pre-layernorm", False,
            "No norms before attention and the MLP, which read the residual stream itself, as in "
            "OLMo 2: see --post-self-attn-layernorm and --post-mlp-layernorm.",
            excludes="--apply-residual-connection-post-layernorm or --parallel-attn"))
    residual_multiplier: float = flag(1.0,
        "Factor of the outputs of attention and of the MLP before they join the residual stream.",
        FACTOR)
    parallel_attn: bool = flag(False,
        "Let attention and the MLP read the same norm of a layer's input.")
    parallel_layernorm: bool = flag(False, "With --parallel-attn: give the MLP a norm of its own.",
        idle_without="--parallel-attn")
    # fmt: on

    @property
    def mlp_has_norm(self) -> bool:
        """Whether the MLP reads a norm of its own, or the stream; else the norm of attention."""
        return self.parallel_layernorm or not self.parallel_attn


@dataclass(frozen=True)
class VocabularySettings:
    """The embedding, the output layer and the loss."""

    # fmt: off
    tie_embeddings: bool = spelled(True,
        spells("--untie-embeddings-and-output-weights", False,
            "Give the output layer a matrix of its own, instead of the embedding's."))
    embed_layernorm: bool = flag(False, "Normalise the word embeddings.")
    embedding_multiplier: float = flag(1.0, "Factor of the word embeddings.", FACTOR,
        excludes="--scale-embeddings-by-hidden-size")
    scale_embeddings_by_hidden_size: bool = flag(False,
        "Multiply the word embeddings by the root of --hidden-size.")
    logit_multiplier: float = flag(1.0,
        "Factor of the logits, before --logit-softcap.", FACTOR)
    label_smoothing: float = flag(0.0, "Share of the target spread evenly over the vocabulary.",
        SHARE)
    z_loss_coeff: float = flag(0.0,
        "Weight of the z-loss: the squared log of the sum of exponentials of a token's logits.",
        WEIGHT)
    logit_softcap: float = flag(0.0,
        "Cap the logits softly: c tanh(logit / c), with c this number; 0: off.", CAP_OR_OFF)
    # fmt: on


@dataclass(frozen=True)
class FurtherTokensSettings:
    """Multi-token prediction."""

    # fmt: off
    mtp_num_layers: int = flag(0,
        "Further tokens that every position predicts (multi-token prediction of DeepSeek-V3). "
        "Each adds a transformer layer to the last stage, or to the stage with m of "
        "--pipeline-model-parallel-layout. 0: only the next token is predicted.",
        Range(0, 1000))
    mtp_loss_scaling_factor: float = flag(0.1,
        "Weight in the loss of the mean loss of the further tokens of --mtp-num-layers.",
        Range(1e-6, 1000), idle_without="--mtp-num-layers")
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class ModelSettings(ShapeSettings):
    """Everything that decides a model's mathematics and the size of its parameters.

    All values are final: ``completed`` has derived every value that no flag gives.

    Attributes:
        vocab_size: real vocabulary entries V, before padding.
    """

    vocab_size: int
    norm: NormSettings
    attention: AttentionSettings
    latent: LatentAttentionSettings
    positions: PositionSettings
    rope_scaling: RopeScalingSettings
    mlp: MLPSettings
    experts: ExpertSettings
    balance: BalanceSettings
    block: BlockSettings
    vocabulary: VocabularySettings
    further: FurtherTokensSettings
    widths: WidthSettings

    @classmethod
    def of(cls, **values: Any) -> "ModelSettings":
        """Return the model with some values, by name; the others have their defaults.

        Raises:
            TypeError: a value is missing that has no default, or a name is unknown.
        """
        return completed(made(cls, values))

    def replaced(self, **values: Any) -> "ModelSettings":
        """Return a copy of the model with other values, by name.

        Raises:
            TypeError: a name is unknown.
        """
        return completed(changed(self, **values))

    def flags(self) -> dict[str, list[str]]:
        """Return the flags that make the model, without its vocabulary, each with its words."""
        found = flags_of(self)
        for own in chain.from_iterable(declared_in(ModelSettings).values()):
            quiet = own.option in found and not own.facts.is_told_if_derived
            if quiet and self.replaced(**{own.name: None}) == self:
                del found[own.option]
        return found

    @property
    def score_scale(self) -> float | None:
        """Factor of the products of queries and keys; ``None``: 1 / root of their channels.

        With YaRN, multi-latent attention lengthens all channels of queries and keys, and other
        attention only the channels that turn.
        """
        given, length = self.attention.softmax_scale, self.rope_scaling.latent_length
        if given is not None or not self.latent.multi_latent_attention or length == 1:
            return given
        scale: float = float(self.attention.kv_channels) ** -0.5
        return length**2 * scale

    def window_of(self, layer: int) -> int | None:
        """Return how many earlier positions a position sees in a layer; ``None``: all positions.

        Args:
            layer: index in the whole model, from 0.
        """
        size = self.attention.window_size
        hides = size is not None and size < self.seq_length - 1
        return size if hides and self.attention.is_local(layer) else None


def completed(model: ModelSettings) -> ModelSettings:
    """Return a model in which every value is final.

    Widths and numbers of heads are derived as in Megatron. A value that another one replaces, or
    that has no effect, has its default, so that models with the same layers are equal.

    Args:
        model: a model whose derived values may be ``None``.
    """
    attention = _attention(model)
    norm = model.norm
    if norm.normalization == "RMSNorm":  # which has no biases
        norm = replace(norm, add_bias_norm=True)
    mlp = replace(model.mlp, ffn_hidden_size=model.mlp.ffn_hidden_size or _ffn(model))
    output_std = model.output_layer_init_method_std
    latent, is_latent = model.latent, model.latent.multi_latent_attention
    positions, scaling = model.positions, model.rope_scaling
    experts, balance = model.experts, model.balance
    if experts.is_mixture:
        has_experts = [int(experts.in_layer(layer)) for layer in range(model.num_layers)]
        experts = replace(
            experts,
            moe_ffn_hidden_size=experts.moe_ffn_hidden_size or mlp.ffn_hidden_size,
            moe_layer_freq=LayerPattern.of(has_experts, 1, first=True),
        )
        if experts.moe_router_num_groups == 1:
            experts = replace(experts, moe_router_num_groups=None, moe_router_group_topk=None)
    else:
        experts, balance = replace(ExpertSettings(), moe_ffn_hidden_size=0), BalanceSettings()
    return replace(
        model,
        output_layer_init_method_std=None if model.vocabulary.tie_embeddings else output_std,
        norm=norm,
        attention=attention,
        mlp=mlp,
        latent=latent if is_latent else LatentAttentionSettings(),
        positions=replace(
            positions,
            max_position_embeddings=positions.max_position_embeddings or model.seq_length,
            no_rope_freq=_shortest(positions.no_rope_freq, model.num_layers, 1),
        ),
        rope_scaling=replace(
            scaling, rope_type=scaling.rope_type or ("yarn" if is_latent else "rope")
        ),
        experts=experts,
        balance=balance,
        vocabulary=_vocabulary(model),
        widths=_widths(model),
    )


def _widths(model: ModelSettings) -> WidthSettings:
    own = model.widths
    if not own.use_mup:
        return WidthSettings()
    base = own.mup_base_hidden_size or model.hidden_size
    return replace(own, mup_base_hidden_size=base, mup_width_mult=None)


def _ffn(model: ModelSettings) -> int:
    hidden = model.hidden_size
    return int(4 * hidden * 2 / 3 / 64) * 64 if model.mlp.is_gated else 4 * hidden


def _attention(model: ModelSettings) -> AttentionSettings:
    own, latent = model.attention, model.latent
    heads, divisor = own.num_attention_heads, own.query_pre_attn_scalar
    groups = own.num_query_groups or (1 if own.group_query_attention else heads)
    channels = own.kv_channels or model.hidden_size // heads
    if latent.multi_latent_attention:
        channels = latent.qk_head_dim + latent.qk_pos_emb_head_dim
    return replace(
        own,
        group_query_attention=groups != heads,
        num_query_groups=groups,
        kv_channels=channels,
        window_attn_skip_freq=_shortest(own.window_attn_skip_freq, model.num_layers, 0),
        softmax_scale=own.softmax_scale if divisor is None else divisor**-0.5,
        query_pre_attn_scalar=None,
    )


def _shortest(pattern: LayerPattern | None, layers: int, last: int) -> LayerPattern | None:
    """Return the shortest equal pattern; ``None``: all layers are as without a pattern."""
    if pattern is None:
        return None
    entries = [pattern.entry(layer, last) for layer in range(layers)]
    return None if set(entries) == {1 - last} else LayerPattern.of(entries, last)


def _vocabulary(model: ModelSettings) -> VocabularySettings:
    own = model.vocabulary
    if not own.scale_embeddings_by_hidden_size:
        return own
    factor = model.hidden_size**0.5
    return replace(own, embedding_multiplier=factor, scale_embeddings_by_hidden_size=False)
