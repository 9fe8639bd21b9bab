"""Multi-latent attention: its flags, and the fields of ``ModelConfig`` that they decide."""

from dataclasses import dataclass, fields
from typing import Any, Final

from megatron.flags.declare import EPSILON, WIDTH, flag
from megatron.flags.groups import Flags

_LATENT: Final = "--multi-latent-attention"


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class LatentFlags:
    """Multi-latent attention of DeepSeek-V2 and V3."""

    multi_latent_attention: bool = flag(False,
        "Form the queries, keys and values of all heads from narrow vectors of the token. "
        "--qk-layernorm normalises these vectors.",
        needs="--position-embedding-type rope",
        lack="rotates a part of queries and keys, so it has no other positions",
        excludes="--group-query-attention or --softmax-type learnable or "
        "--softmax-type off-by-one or --qk-layernorm-across-heads")
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
    latent_norm_epsilon: float | None = flag(None,
        "Epsilon of the norms of the narrow vectors.", EPSILON, unset="--norm-epsilon",
        idle_without=_LATENT)
# fmt: on


def latent_fields(flags: Flags) -> dict[str, Any]:
    """Return the fields of ``ModelConfig`` about multi-latent attention, by name."""
    own = flags[LatentFlags]
    if not own.multi_latent_attention:
        return {field.name: field.default for field in fields(LatentFlags)}
    values = {field.name: getattr(own, field.name) for field in fields(LatentFlags)}
    return values | {"kv_channels": own.qk_head_dim + own.qk_pos_emb_head_dim}
