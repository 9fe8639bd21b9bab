"""The settings of the parts of a layer. A class declares flags; its values build a part."""

import re
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from torch import nn

from megatron.flags.declare import derived, flag, required, spelled, spells
from megatron.flags.ranges import (
    CAP,
    CAP_OR_OFF,
    EPSILON,
    FACTOR,
    LENGTH,
    PERCENT,
    SHARE,
    STRETCH,
    THETA,
    WEIGHT,
    WIDTH,
    Range,
)
from megatron.flags.readable import plain_number
from megatron.layers.heads_norm import HeadsNorm
from megatron.layers.mlp import Activation, QuickGeGLU, is_gated
from megatron.layers.norm import NormKind, build_norm
from megatron.layers.patterns import LayerPattern
from megatron.layers.rope_scaling import (
    DynamicScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
    length_factor,
)
from megatron.layers.site import Site

Sinks: TypeAlias = Literal["vanilla", "off-by-one", "learnable"]
"""The score of a key without a value: there is no such key, it is 0, or every head learns it."""

PositionEmbedding = Literal["learned_absolute", "rope", "alibi", "none"]

RopeType = Literal["rope", "yarn", "dynamic", "longrope"]
"""Scaling of RoPE's frequencies: none or Llama 3.1's, YaRN's, dynamic NTK scaling, LongRoPE's."""

_LATENT: Final = "--multi-latent-attention"
_ROPE: Final = "--position-embedding-type rope"
_LONG: Final = "--rope-type longrope"
_SCALED: Final = f"--rope-type yarn or --rope-type dynamic or {_LONG} or --multi-latent-attention"
_YARN: Final = "--rope-type yarn or --multi-latent-attention"
_OTHERS: Final = f"--rope-type rope or --rope-type dynamic or {_LONG}"
PATTERN: Final = "N|[0,1,...]"
"""Form of a pattern of layers in the help."""


def read_window(words: str) -> int:
    """Return the number of earlier positions that a position sees, of words such as 4096,0.

    Raises:
        ValueError: the words are not two numbers, or a position would see later positions.
    """
    found = re.fullmatch(r"\(?(\d+), ?(\d+)\)?", words)
    if found is None:
        raise ValueError("give two numbers, as in 4096,0")
    if int(found[2]):
        raise ValueError(f"a position of a GPT sees no later ones; give {found[1]},0")
    return int(found[1])


def _plain_word(number: float) -> str:
    return str(plain_number(number))


@dataclass(frozen=True)
class NormSettings:
    """Norms."""

    # fmt: off
    normalization: NormKind = flag("LayerNorm", "Kind of all norms.")
    norm_epsilon: float = flag(1e-5, "Epsilon of all norms.", EPSILON)
    apply_layernorm_1p: bool = flag(False, "Keep the weight of a norm as its distance from 1.")
    add_bias_norm: bool = spelled(True,
        spells("--disable-bias-norm", False, "No biases in LayerNorms, as in Cohere's models.",
            idle_with="--normalization RMSNorm"))
    # fmt: on

    def build(self, size: int, site: Site, *, of_stream: bool = False) -> nn.Module:
        """Return a norm over ``size`` channels.

        Args:
            size: number of channels.
            site: device, dtype, ranks and kernels of the norm.
            of_stream: the norm reads the residual stream, which may be fp32.
        """
        kernels = site.stream_kernels if of_stream else site.kernels
        return build_norm(
            self.normalization,
            size,
            self.norm_epsilon,
            site.dtype,
            site.device,
            kernels,
            zero_centred=self.apply_layernorm_1p,
            bias=self.add_bias_norm,
        )

    def across(self, channels: int, site: Site) -> nn.Module:
        """Return a norm over the channels of all heads, which tensor-parallel ranks share."""
        assert self.normalization == "RMSNorm", f"no {self.normalization} over all heads"
        return HeadsNorm(channels, self.norm_epsilon, site, zero_centred=self.apply_layernorm_1p)


@dataclass(frozen=True)
class AttentionSettings:
    """Attention."""

    # fmt: off
    num_attention_heads: int = required("Query heads.", WIDTH)
    group_query_attention: bool = flag(False, "Share key/value heads among query heads.")
    num_query_groups: int = derived("Key/value heads; each serves a group of query heads.", WIDTH,
        unset="1, or heads without --group-query-attention", idle_without="--group-query-attention")
    kv_channels: int = derived("Width of a head.", WIDTH, unset="hidden / heads", idle_with=_LATENT)
    qk_layernorm: bool = flag(False,
        "Normalise queries and keys per head. With "
        "--multi-latent-attention: normalise the narrow vectors from which they are formed.")
    qk_layernorm_across_heads: bool = flag(False,
        "Normalise queries and keys over the channels of all heads at once, as OLMoE does.",
        needs="--qk-layernorm")
    qk_layernorm_after_rotation: bool = flag(False,
        "Normalise queries and keys after RoPE has turned them, as Hunyuan does; otherwise before.",
        needs="--qk-layernorm", idle_without=_ROPE)
    add_qkv_bias: bool = flag(False,
        "Add biases to queries, keys and values, also with --disable-bias-linear.",
        idle_without="--disable-bias-linear", idle_with=_LATENT)
    add_proj_bias: bool = flag(False,
        "Add a bias to the projection of attention's output, also with --disable-bias-linear. "
        "With --add-qkv-bias all of attention has biases, and the MLP has none.",
        idle_without="--disable-bias-linear", idle_with=_LATENT)
    attention_dropout: float = flag(0.1, "Dropout on attention probabilities.", SHARE)
    window_size: int | None = flag(None,
        "Tokens that a position sees: itself, L earlier ones, and 0 later ones.",
        unset="all earlier ones", metavar="L,0", reads=read_window, writes="{},0".format)
    window_attn_skip_freq: LayerPattern | None = flag(None,
        "N: every N-th layer sees all earlier positions. Or a list with 1 for each layer with the "
        "window and 0 for each other layer, as in '[1,1,0]*8'.", unset="all layers have the window",
        metavar=PATTERN, reads=LayerPattern.read, idle_without="--window-size")
    attn_logit_softcapping: float = flag(0.0,
        "Cap attention's scores softly: c tanh(score / c), with c this number; 0: off.", CAP_OR_OFF)
    softmax_type: Sinks = flag("vanilla",
        "Let one more key without a value take part in attention's softmax, so that a head may "
        "attend to nothing: with a score that every head learns (learnable: attention sinks, as in "
        "GPT-OSS), or with a score of 0 (off-by-one).")
    softmax_scale: float | None = flag(None, "Factor of the products of queries and keys.",
        Range(1e-8, 1000), unset="1 / sqrt(width of a head)", excludes="--query-pre-attn-scalar")
    query_pre_attn_scalar: int | None = flag(None,
        "Divide the products of queries and keys by the root of this number.", WIDTH,
        unset="the width of a head")
    # fmt: on

    def is_local(self, layer: int) -> bool:
        """Return whether a layer has the window.

        Args:
            layer: index in the whole model, from 0.
        """
        pattern = self.window_attn_skip_freq
        return self.window_size is not None and (pattern is None or bool(pattern.entry(layer, 0)))


@dataclass(frozen=True)
class LatentAttentionSettings:
    """Multi-latent attention of DeepSeek-V2 and V3."""

    # fmt: off
    multi_latent_attention: bool = flag(False,
        "Form the queries, keys and values of all heads from narrow vectors of the token. "
        "--qk-layernorm normalises these vectors.", needs="--position-embedding-type rope",
        lack="rotates a part of queries and keys, so it has no other positions",
        excludes="--group-query-attention or --softmax-type learnable or "
        "--softmax-type off-by-one or --qk-layernorm-across-heads or "
        "--qk-layernorm-after-rotation")
    q_lora_rank: int | None = flag(None, "Width of the vector from which queries are formed.",
        WIDTH, unset="queries are formed from the layer's input", idle_without=_LATENT)
    kv_lora_rank: int = flag(32, "Width of the vector from which keys and values are formed.",
        WIDTH, idle_without=_LATENT)
    qk_head_dim: int = flag(128, "Channels of a head's queries and keys that RoPE does not turn.",
        WIDTH, idle_without=_LATENT)
    qk_pos_emb_head_dim: int = flag(64,
        "Channels of a head's queries and keys that RoPE turns, neighbours together. All heads "
        "share one set of these channels for keys.", WIDTH, idle_without=_LATENT)
    v_head_dim: int = flag(128, "Channels of a head's values.", WIDTH, idle_without=_LATENT)
    latent_norm_epsilon: float | None = flag(None, "Epsilon of the norms of the narrow vectors.",
        EPSILON, unset="--norm-epsilon", idle_without=_LATENT)
    # fmt: on

    @property
    def query_channels(self) -> int:
        """Channels of a head's queries and keys."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def width(self) -> int:
        """Channels of queries, keys and values in the kernels, which want equal widths."""
        return max(self.query_channels, self.v_head_dim)


@dataclass(frozen=True)
class PositionSettings:
    """Positions of tokens."""

    # fmt: off
    position_embedding_type: PositionEmbedding = flag("learned_absolute",
        "learned_absolute: a learned table; rope: rotated queries and keys; alibi: scores that "
        "fall with distance; none: nothing.")
    max_position_embeddings: int = derived(
        "Rows of the learned position table, and so the longest sequence that has positions.",
        LENGTH, unset="--seq-length")
    rotary_base: float = flag(10000.0, "Base of RoPE's frequencies (theta).", THETA,
        writes=_plain_word, idle_without=_ROPE)
    rotary_percent: float = flag(1.0, "Share of each head that RoPE rotates.", PERCENT,
        idle_without=_ROPE)
    rotary_interleaved: bool = flag(False,
        "RoPE turns channels 2i and 2i + 1 together, not channel i of the first half with channel "
        "i of the second half.", idle_without=_ROPE, idle_with=_LATENT)
    rotary_base_local: float | None = flag(None,
        "RoPE theta of the layers with a window; their frequencies are not scaled.", THETA,
        unset="theta of all layers", writes=_plain_word, needs="--window-size",
        idle_without=_ROPE)
    rotary_seq_len_interpolation_factor: int = flag(1, "Number by which RoPE divides positions.",
        STRETCH, idle_without=_ROPE)
    no_rope_freq: LayerPattern | None = flag(None,
        "N: every N-th layer does not rotate. Or a list with 1 for each layer that does not "
        "rotate and 0 for each other layer, as in '[0,0,0,1]*6'.", unset="all layers rotate",
        metavar=PATTERN, reads=LayerPattern.read, idle_without=_ROPE)
    # fmt: on

    @property
    def has_slopes(self) -> bool:
        """Whether scores fall with distance, by a slope of every head (ALiBi)."""
        return self.position_embedding_type == "alibi"

    def rotates(self, layer: int) -> bool:
        """Return whether queries and keys of a layer are rotated.

        Args:
            layer: index in the whole model, from 0.
        """
        pattern = self.no_rope_freq
        rotated = pattern is None or not pattern.entry(layer)
        return self.position_embedding_type == "rope" and rotated


@dataclass(frozen=True)
class RopeScalingSettings:
    """RoPE for samples longer than those of the original training."""

    # fmt: off
    use_rope_scaling: bool = flag(False,
        "Lower the low frequencies of RoPE, as Llama 3.1 does for samples of more than 8192 "
        "tokens.", idle_without=_ROPE, idle_with=_LATENT)
    rope_scaling_factor: float = flag(8.0,
        "Number by which --use-rope-scaling divides the lowest frequencies of RoPE.", STRETCH,
        idle_without="--use-rope-scaling")
    rope_type: RopeType = derived(
        "yarn: divide RoPE's low frequencies, and lengthen queries and keys (YaRN); dynamic: raise "
        "theta in samples of more than --original-max-position-embeddings tokens (dynamic NTK "
        "scaling); longrope: divide the frequency of every pair of channels by a number of its "
        "own, and lengthen queries and keys (LongRoPE, as in Phi-3); rope: nothing of this.",
        unset="yarn with --multi-latent-attention, else rope",
        idle_without=_ROPE, is_told_if_derived=False)
    rotary_scaling_factor: float = flag(1.0,
        "With yarn: divisor of the lowest frequencies. With dynamic: the lowest frequency is "
        "divided by F L / O - (F - 1) with this factor F, --seq-length L and "
        "--original-max-position-embeddings O. With longrope: the channels that RoPE turns are "
        "multiplied by the root of 1 + log F / log O. See --mscale-all-dim too.", STRETCH,
        idle_without=_SCALED)
    original_max_position_embeddings: int = flag(4096,
        "Tokens of a sample in the original training.", LENGTH, idle_without=_SCALED,
        idle_with="--rope-type rope")
    beta_fast: float = flag(32.0,
        "YaRN keeps the frequencies with this many turns or more in a sample of the original "
        "training.", FACTOR, idle_without=_YARN, idle_with=_OTHERS)
    beta_slow: float = flag(1.0,
        "YaRN divides the frequencies with this many turns or fewer by --rotary-scaling-factor.",
        FACTOR, idle_without=_YARN, idle_with=_OTHERS)
    mscale: float = flag(1.0,
        "YaRN multiplies the channels that RoPE turns by 1 + 0.1 m log(--rotary-scaling-factor), "
        "with this m.", WEIGHT, idle_without=_YARN, idle_with=_OTHERS)
    mscale_all_dim: float = flag(0.0,
        "YaRN divides the factor of --mscale by the same formula, with this m. Multi-latent "
        "attention multiplies all scores by the square of the divisor, whatever --rope-type is, "
        "as Megatron-Core does.", WEIGHT, idle_without=_YARN)
    rope_short_factors: tuple[float, ...] = flag((),
        "LongRoPE's divisors of the frequencies, one for each pair of channels, in samples of up "
        "to --original-max-position-embeddings tokens.", FACTOR, needs=_LONG)
    rope_long_factors: tuple[float, ...] = flag((),
        "LongRoPE's divisors of the frequencies in longer samples.", FACTOR, needs=_LONG)
    yarn_exact_range: bool = flag(False,
        "YaRN's interpolation between the two kinds of frequencies begins and ends between "
        "channels; otherwise its ends are rounded outwards.", idle_without=_YARN, idle_with=_OTHERS)
    # fmt: on

    def scaling(self, seq_length: int) -> RopeScaling | None:
        """Return how RoPE's frequencies are scaled; ``None``: they are not.

        Args:
            seq_length: tokens of a sample.
        """
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
            return DynamicScaling(self.rotary_scaling_factor, original, seq_length)
        if self.rope_type == "longrope":
            is_long = seq_length > original
            own = self.rope_long_factors if is_long else self.rope_short_factors
            return LongRopeScaling(self.rotary_scaling_factor, original, own)
        return Llama3Scaling(self.rope_scaling_factor) if self.use_rope_scaling else None

    @property
    def latent_length(self) -> float:
        """Length that multi-latent attention gives all channels of queries and keys.

        Other attention gives a length only to the channels that turn.
        """
        return length_factor(self.rotary_scaling_factor, self.mscale_all_dim)


@dataclass(frozen=True)
class MLPSettings:
    """The MLP."""

    # fmt: off
    ffn_hidden_size: int = derived("Width of the MLP.", WIDTH,
        unset="4 x hidden; with a gated MLP 8/3 x hidden in multiples of 64")
    activation: Literal[
        "gelu", "exact_gelu", "relu", "swiglu", "squared_relu", "geglu", "quick_geglu"
    ] = spelled("gelu",
        spells("--exact-gelu", "exact_gelu",
            "GELU by the error function in the MLP, instead of GELU's tanh approximation."),
        spells("--relu", "relu", "ReLU in the MLP instead of GELU."),
        spells("--swiglu", "swiglu", "SiLU-gated MLP instead of GELU."),
        spells("--squared-relu", "squared_relu", "Squared ReLU in the MLP instead of GELU."),
        spells("--geglu", "geglu", "GELU-gated MLP, by the tanh approximation, instead of GELU."),
        spells("--quick-geglu", "quick_geglu",
            "MLP gated by x sigmoid(1.702 x), an approximation of GELU, instead of GELU."))
    activation_func_clamp_value: float | None = flag(None,
        "With --quick-geglu: the gate is at most this number, and the half that the gate "
        "multiplies lies between minus and plus this number, as in GPT-OSS.", CAP, unset="no limit",
        needs="--quick-geglu")
    glu_linear_offset: float = flag(0.0,
        "Add this number to the half that the gate of --quick-geglu multiplies, as in GPT-OSS.",
        Range(-1000, 1000), needs="--quick-geglu")
    # fmt: on

    @property
    def function(self) -> Activation:
        """The activation function."""
        if self.activation == "quick_geglu":
            return QuickGeGLU(self.activation_func_clamp_value, self.glu_linear_offset)
        return self.activation

    @property
    def is_gated(self) -> bool:
        """Whether the MLP's first layer has two halves."""
        return is_gated(self.function)
