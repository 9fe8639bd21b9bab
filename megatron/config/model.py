"""The shape and the mathematics of the model: flags and rules."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from megatron.config.latent_attention import LatentFlags
from megatron.flags.declare import (
    CAP_OR_OFF,
    DEPTH,
    EPSILON,
    LENGTH,
    PERCENT,
    SHARE,
    STRETCH,
    WEIGHT,
    WIDTH,
    Range,
    flag,
    required,
    up_to,
)
from megatron.flags.groups import Flags
from megatron.model.config import PositionEmbedding

_ROPE: Final = "--position-embedding-type rope"
_LATENT: Final = "--multi-latent-attention"


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class ModelFlags:
    """The model's shape and mathematics."""

    num_layers: int = required("Transformer layers.", DEPTH)
    hidden_size: int = required("Width of the model.", WIDTH)
    num_attention_heads: int = required("Query heads.", WIDTH)
    seq_length: int = required("Tokens per sample.", LENGTH)
    max_position_embeddings: int | None = flag(None,
        "Rows of the learned position table, and so the longest sequence that has positions.",
        LENGTH, unset="--seq-length")
    ffn_hidden_size: int | None = flag(None, "Width of the MLP.", WIDTH,
        unset="4 x hidden; with a gated MLP 8/3 x hidden in multiples of 64")
    group_query_attention: bool = flag(False, "Share key/value heads among query heads.")
    num_query_groups: int | None = flag(None,
        "Key/value heads; each serves a group of query heads.", WIDTH,
        unset="1, or heads without --group-query-attention", idle_without="--group-query-attention")
    kv_channels: int | None = flag(None, "Width of a head.", WIDTH, unset="hidden / heads",
        idle_with=_LATENT)
    position_embedding_type: PositionEmbedding = flag("learned_absolute",
        "learned_absolute: a learned table; rope: rotated queries and keys; alibi: scores that "
        "fall with distance; none: nothing.")
    rotary_base: int = flag(10000, "Base of RoPE's frequencies (theta).", up_to(10**12),
        idle_without=_ROPE)
    rotary_percent: float = flag(1.0, "Share of each head that RoPE rotates.", PERCENT,
        idle_without=_ROPE)
    rotary_interleaved: bool = flag(False,
        "RoPE turns channels 2i and 2i + 1 together, not channel i of the first half with channel "
        "i of the second half.",
        idle_without=_ROPE, idle_with=_LATENT)
    use_rope_scaling: bool = flag(False,
        "Lower the low frequencies of RoPE, as Llama 3.1 does for samples of more than 8192 "
        "tokens.", idle_without=_ROPE, idle_with=_LATENT)
    rope_scaling_factor: float = flag(8.0,
        "Number by which --use-rope-scaling divides the lowest frequencies of RoPE.", STRETCH,
        idle_without="--use-rope-scaling")
    normalization: Literal["LayerNorm", "RMSNorm"] = flag("LayerNorm", "Kind of all norms.")
    norm_epsilon: float = flag(1e-5, "Epsilon of all norms.", EPSILON)
    swiglu: bool = flag(False, "SiLU-gated MLP instead of GELU.")
    squared_relu: bool = flag(False, "Squared ReLU in the MLP instead of GELU.",
        excludes="--swiglu")
    qk_layernorm: bool = flag(False, "Normalise queries and keys per head. With "
        "--multi-latent-attention: normalise the narrow vectors from which they are formed.")
    qk_layernorm_across_heads: bool = flag(False,
        "Normalise queries and keys over the channels of all heads at once, as OLMoE does.",
        needs="--qk-layernorm")
    disable_bias_linear: bool = flag(False, "No biases in the linear layers.")
    add_qkv_bias: bool = flag(False,
        "Add biases to queries, keys and values, also with --disable-bias-linear.",
        idle_without="--disable-bias-linear", idle_with=_LATENT)
    untie_embeddings_and_output_weights: bool = flag(False,
        "Give the output layer a matrix of its own, instead of the embedding's.")
    attention_dropout: float = flag(0.1, "Dropout on attention probabilities.", SHARE)
    hidden_dropout: float = flag(0.1, "Dropout on the embedding and on the residual branches.",
        SHARE)
    init_method_std: float = flag(0.02, "Standard deviation of the initial weights.", Range(0, 10))
    label_smoothing: float = flag(0.0, "Share of the target spread evenly over the vocabulary.",
        SHARE)
    z_loss_coeff: float = flag(0.0,
        "Weight of the z-loss: the squared log of the sum of exponentials of a token's logits.",
        WEIGHT)
    logit_softcap: float = flag(0.0,
        "Cap the logits softly: c tanh(logit / c), with c this number; 0: off.", CAP_OR_OFF)
# fmt: on


def _heads(flags: Flags) -> Iterator[str]:
    model, heads = flags[ModelFlags], flags[ModelFlags].num_attention_heads
    derived = model.kv_channels is None and not flags[LatentFlags].multi_latent_attention
    if derived and model.hidden_size % heads:
        yield (
            f"--num-attention-heads {heads} does not divide --hidden-size {model.hidden_size}: "
            "change one of them, or give the width of a head with --kv-channels"
        )
    if model.group_query_attention and heads % (model.num_query_groups or 1):
        yield (
            f"--num-query-groups {model.num_query_groups} does not divide "
            f"--num-attention-heads {heads}: every group needs as many query heads"
        )


def _positions(flags: Flags) -> Iterator[str]:
    model, positions = flags[ModelFlags], flags[ModelFlags].max_position_embeddings
    if positions is not None and model.seq_length > positions:
        yield (
            f"--seq-length {model.seq_length} is longer than --max-position-embeddings "
            f"{positions}: raise the latter, or leave it out"
        )


def _rotation(flags: Flags) -> Iterator[str]:
    model = flags[ModelFlags]
    if model.position_embedding_type != "rope":
        return
    head, rotated = rotated_channels(flags)
    if rotated < 2 or rotated % 2:
        yield (
            f"--rotary-percent {model.rotary_percent} rotates {rotated} of the {head} "
            "channels of a head: it takes an even number of them, at least 2"
        )


def rotated_channels(flags: Flags) -> tuple[int, int]:
    """Return how many channels of a head RoPE may rotate, and how many it does rotate."""
    model, latent = flags[ModelFlags], flags[LatentFlags]
    head = model.kv_channels or model.hidden_size // model.num_attention_heads
    if latent.multi_latent_attention:
        head = latent.qk_pos_emb_head_dim
    return head, int(head * model.rotary_percent)


def _norm_across_heads(flags: Flags) -> Iterator[str]:
    model = flags[ModelFlags]
    if model.qk_layernorm_across_heads and model.normalization != "RMSNorm":
        yield (
            "--qk-layernorm-across-heads is an RMSNorm: give --normalization RMSNorm, or leave it "
            "out"
        )


MODEL_RULES: Final = (_heads, _positions, _rotation, _norm_across_heads)
