"""The flags of what layers are made of: windows and scores of attention, norms, their order.

The names are Megatron-LM's where it has one, else those of its relatives: MindSpeed-LLM (caps of
scores, GeGLU), Megatron-LLM of EPFL (parallel layers), BigScience's Megatron-DeepSpeed (the norm of
embeddings) and Megatron-Bridge (RoPE of local layers).
"""

from dataclasses import dataclass
from typing import Final

from megatron.config.declare import COUNT, NOT_NEGATIVE, POSITIVE, WIDTH, flag, up_to

_ROPE: Final = "--position-embedding-type rope"
_PATTERN: Final = "N|[0,1,...]"

# The formatter is off so that the flags read as a table.
# fmt: off


@dataclass(frozen=True)
class LayerFlags:
    """What the layers are made of, where they differ from a plain GPT's."""

    window_size: str | None = flag(None,
        "A position sees itself and L earlier ones, and 0 later ones.", unset="all earlier ones",
        metavar="L,0")
    window_attn_skip_freq: str | None = flag(None,
        "Every N-th layer sees all earlier positions; or a list with 1 for each layer with the "
        "window, as in '[1,1,0]*8'.", unset="all layers have the window", metavar=_PATTERN,
        idle_without="--window-size")
    attn_logit_softcapping: float = flag(0.0,
        "c of c tanh(score / c) in attention; 0: off.", NOT_NEGATIVE)
    softmax_scale: float | None = flag(None, "Factor of the products of queries and keys.",
        POSITIVE, unset="1 / sqrt(width of a head)", excludes="--query-pre-attn-scalar")
    query_pre_attn_scalar: int | None = flag(None,
        "Divide the products of queries and keys by the root of this number.", WIDTH,
        unset="the width of a head")
    rotary_base_local: int | None = flag(None,
        "RoPE theta of the layers with a window; their frequencies are not scaled.", up_to(10**12),
        unset="that of all layers", needs="--window-size", idle_without=_ROPE)
    rotary_seq_len_interpolation_factor: int = flag(1, "RoPE divides positions by it.", COUNT,
        idle_without=_ROPE)
    no_rope_freq: str | None = flag(None,
        "Every N-th layer does not rotate; or a list with 1 for each that does not, as in "
        "'[0,0,0,1]*6'.", unset="all layers rotate", metavar=_PATTERN, idle_without=_ROPE)
    apply_layernorm_1p: bool = flag(False,
        "Norms keep their weights as the distance from 1.")
    post_self_attn_layernorm: bool = flag(False,
        "Normalise what attention adds to the residual stream.")
    post_mlp_layernorm: bool = flag(False, "Normalise what the MLP adds to the residual stream.")
    apply_residual_connection_post_layernorm: bool = flag(False,
        "Attention and MLP add to their norm's output, not to its input.")
    parallel_attn: bool = flag(False,
        "Attention and MLP read the same norm of a layer's input.")
    parallel_layernorm: bool = flag(False, "Then the MLP has a norm of its own.",
        idle_without="--parallel-attn")
    geglu: bool = flag(False,
        "GELU-gated MLP, by the tanh approximation, instead of GELU.",
        excludes="--swiglu or --squared-relu")
    embed_layernorm: bool = flag(False, "Normalise the word embeddings.")
    embedding_multiplier: float = flag(1.0, "Factor of the word embeddings.", POSITIVE,
        excludes="--scale-embeddings-by-hidden-size")
    scale_embeddings_by_hidden_size: bool = flag(False,
        "Multiply the word embeddings by the root of --hidden-size.")
    mtp_num_layers: int = flag(0,
        "Further tokens that every position predicts (multi-token prediction of DeepSeek-V3), each "
        "with a transformer layer more on the last stage; 0: only the next one.", NOT_NEGATIVE)
    mtp_loss_scaling_factor: float = flag(0.1,
        "Weight of the mean of their losses in the loss.", POSITIVE,
        idle_without="--mtp-num-layers")
