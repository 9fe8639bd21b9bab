"""Parts of a model, and how they fit each other and the documents of a sample."""

from collections.abc import Iterator

from megatron.data.settings import DocumentSettings
from megatron.flags.groups import Flags, options_of
from megatron.flags.rules import notes, refuses
from megatron.flags.tree import told
from megatron.layers.experts.settings import ExpertSettings
from megatron.layers.patterns import LayerPattern
from megatron.layers.settings import (
    AttentionSettings,
    LatentAttentionSettings,
    MLPSettings,
    NormSettings,
    PositionSettings,
    RopeScalingSettings,
    RopeType,
)
from megatron.model.settings import FurtherTokensSettings, ShapeSettings, VocabularySettings


@refuses
def _heads(flags: Flags) -> Iterator[str]:
    own, hidden = flags[AttentionSettings], flags[ShapeSettings].hidden_size
    heads = own.num_attention_heads
    derived = own.kv_channels is None and not flags[LatentAttentionSettings].multi_latent_attention
    if derived and hidden % heads:
        yield (
            f"--num-attention-heads {heads} does not divide --hidden-size {hidden}: "
            "change one of them, or give the width of a head with --kv-channels"
        )
    if own.group_query_attention and heads % (own.num_query_groups or 1):
        yield (
            f"--num-query-groups {own.num_query_groups} does not divide "
            f"--num-attention-heads {heads}: every group needs as many query heads"
        )


@refuses
def _positions(flags: Flags) -> Iterator[str]:
    length = flags[ShapeSettings].seq_length
    positions = flags[PositionSettings].max_position_embeddings
    if positions is not None and length > positions:
        yield (
            f"--seq-length {length} is longer than --max-position-embeddings "
            f"{positions}: raise the latter, or leave it out"
        )


@refuses
def _rotation(flags: Flags) -> Iterator[str]:
    own = flags[PositionSettings]
    if own.position_embedding_type != "rope":
        return
    head, rotated = _rotated_channels(flags)
    if rotated < 2 or rotated % 2:
        yield (
            f"--rotary-percent {own.rotary_percent} rotates {rotated} of the {head} "
            "channels of a head: it takes an even number of them, at least 2"
        )


def _rotated_channels(flags: Flags) -> tuple[int, int]:
    """Return how many channels of a head RoPE may rotate, and how many it does rotate."""
    attention, latent = flags[AttentionSettings], flags[LatentAttentionSettings]
    hidden = flags[ShapeSettings].hidden_size
    head = attention.kv_channels or hidden // attention.num_attention_heads
    if latent.multi_latent_attention:
        head = latent.qk_pos_emb_head_dim
    return head, int(head * flags[PositionSettings].rotary_percent)


@refuses
def _norm_across_heads(flags: Flags) -> Iterator[str]:
    is_asked = flags[AttentionSettings].qk_layernorm_across_heads
    if is_asked and flags[NormSettings].normalization != "RMSNorm":
        yield (
            "--qk-layernorm-across-heads is an RMSNorm: give --normalization RMSNorm, or leave it "
            "out"
        )


@refuses
def _mlp(flags: Flags) -> Iterator[str]:
    own, hidden = flags[MLPSettings], flags[ShapeSettings].hidden_size
    if own.is_gated and own.ffn_hidden_size is None and hidden < 24:
        [gate] = told(MLPSettings, "activation", own.activation)
        yield (
            f"{gate} with --hidden-size {hidden} leaves an MLP without width, "
            "as its default is a multiple of 64: give --ffn-hidden-size"
        )


@refuses
def _window_layers(flags: Flags) -> Iterator[str]:
    own = flags[AttentionSettings].window_attn_skip_freq
    yield from _misfit("--window-attn-skip-freq", own, flags)


@refuses
def _unrotated_layers(flags: Flags) -> Iterator[str]:
    yield from _misfit("--no-rope-freq", flags[PositionSettings].no_rope_freq, flags)


@refuses
def _layers_with_experts(flags: Flags) -> Iterator[str]:
    own = flags[ExpertSettings]
    if not own.is_mixture:
        return
    faults = list(_misfit("--moe-layer-freq", own.moe_layer_freq, flags))
    yield from faults
    if not faults and not any(map(own.in_layer, range(flags[ShapeSettings].num_layers))):
        yield (
            f"--moe-layer-freq {own.moe_layer_freq} gives no layer experts: leave out --num-experts"
        )


def _misfit(option: str, pattern: LayerPattern | None, flags: Flags) -> Iterator[str]:
    """Yield the fault of a pattern that does not fit the number of layers."""
    fault = None if pattern is None else pattern.fault(flags[ShapeSettings].num_layers)
    if fault is not None:
        yield f"{option} {pattern} {fault}"


@refuses
def _predicted_tokens(flags: Flags) -> Iterator[str]:
    depths = flags[FurtherTokensSettings].mtp_num_layers
    length = flags[ShapeSettings].seq_length
    if not depths:
        return
    given = f"--mtp-num-layers {depths}"
    if depths >= length:
        yield (
            f"{given} predicts tokens behind the end of every sample, which has --seq-length "
            f"{length}: lower it"
        )
    for option, value in options_of(DocumentSettings, flags[DocumentSettings]):
        if value:
            yield (
                f"{given} with {option}: the tokens that follow may be of another document, and "
                "its layers see the whole sample: leave one of them out"
            )
    if flags[PositionSettings].position_embedding_type == "learned_absolute":
        yield (
            f"{given} with --position-embedding-type learned_absolute needs the table of the first "
            "stage where further tokens are predicted too: use rope, alibi or none"
        )
    if flags[VocabularySettings].embed_layernorm:
        yield (
            f"{given} with --embed-layernorm needs the norm of the first stage where further "
            "tokens are predicted too: leave one of them out"
        )


@notes
def _wide_window(flags: Flags) -> Iterator[str]:
    size, length = flags[AttentionSettings].window_size, flags[ShapeSettings].seq_length
    if size is None or flags[PositionSettings].rotary_base_local is not None:
        return
    if size >= length - 1:
        yield f"--window-size {size},0 changes nothing: a sample has {length} tokens"


def _rope_type(flags: Flags) -> RopeType:
    """Return how RoPE is scaled; for multi-latent attention YaRN is the default."""
    is_latent = flags[LatentAttentionSettings].multi_latent_attention
    return flags[RopeScalingSettings].rope_type or ("yarn" if is_latent else "rope")


@refuses
def _two_scalings(flags: Flags) -> Iterator[str]:
    kind, is_latent = _rope_type(flags), flags[LatentAttentionSettings].multi_latent_attention
    if flags[RopeScalingSettings].use_rope_scaling and kind != "rope" and not is_latent:
        yield f"--rope-type {kind} and --use-rope-scaling scale the same frequencies: take one"


@refuses
def _betas(flags: Flags) -> Iterator[str]:
    own = flags[RopeScalingSettings]
    if _rope_type(flags) == "yarn" and own.beta_fast < own.beta_slow:
        yield (
            f"--beta-fast {own.beta_fast:g} is less than --beta-slow {own.beta_slow:g}: "
            "frequencies with more turns are the fast ones; raise the former"
        )


@refuses
def _divisors(flags: Flags) -> Iterator[str]:
    own, kind = flags[RopeScalingSettings], _rope_type(flags)
    if kind != "longrope":
        return
    if flags[LatentAttentionSettings].multi_latent_attention:
        yield "--multi-latent-attention with --rope-type longrope: give --rope-type yarn or rope"
    if own.original_max_position_embeddings == 1:
        yield (
            "--original-max-position-embeddings 1 with --rope-type longrope: the lengthening "
            "divides by its logarithm; give the tokens of a sample in the original training"
        )
    pairs = _rotated_channels(flags)[1] // 2
    for option, given in (
        ("--rope-short-factors", own.rope_short_factors),
        ("--rope-long-factors", own.rope_long_factors),
    ):
        if len(given) != pairs:
            yield (
                f"{option} has {len(given)} numbers, and RoPE turns {pairs} pairs of channels of "
                "a head: --rope-type longrope needs one number for each pair"
            )


@refuses
def _pairs(flags: Flags) -> Iterator[str]:
    kind = _rope_type(flags)
    _, rotated = _rotated_channels(flags)
    if kind == "rope" or flags[RopeScalingSettings].rotary_scaling_factor == 1:
        return
    if rotated < 4:
        yield (
            f"--rope-type {kind} scales some pairs of channels and not others, and {rotated} "
            "channels of a head turn: widen heads, or leave --rope-type out"
        )
    if kind == "yarn" and flags[PositionSettings].rotary_base == 1:
        yield "--rotary-base 1 gives all pairs one frequency, and --rope-type yarn needs several"
