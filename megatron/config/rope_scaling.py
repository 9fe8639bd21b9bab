"""Scalings of RoPE for longer samples: YaRN and dynamic NTK scaling. Flags and rules."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Final

from megatron.config.latent_attention import LatentFlags
from megatron.config.model import ModelFlags, rotated_channels
from megatron.flags.declare import FACTOR, LENGTH, STRETCH, WEIGHT, flag
from megatron.flags.groups import Flags, Rule
from megatron.model.config import RopeType

_SCALED: Final = "--rope-type yarn or --rope-type dynamic or --multi-latent-attention"
_YARN: Final = "--rope-type yarn or --multi-latent-attention"
_OTHERS: Final = "--rope-type rope or --rope-type dynamic"


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class RopeScalingFlags:
    """RoPE for samples longer than those of the original training."""

    rope_type: RopeType | None = flag(None,
        "yarn: divide RoPE's low frequencies, and lengthen queries and keys (YaRN); dynamic: raise "
        "theta in samples of more than --original-max-position-embeddings tokens (dynamic NTK "
        "scaling); rope: neither.", unset="yarn with --multi-latent-attention, else rope",
        idle_without="--position-embedding-type rope")
    rotary_scaling_factor: float = flag(1.0,
        "With yarn: divisor of the lowest frequencies. With dynamic: the lowest frequency is "
        "divided by F L / O - (F - 1) with this factor F, --seq-length L and "
        "--original-max-position-embeddings O. See --mscale-all-dim too.", STRETCH,
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
        "with this m.",
        WEIGHT, idle_without=_YARN, idle_with=_OTHERS)
    mscale_all_dim: float = flag(0.0,
        "YaRN divides the factor of --mscale by the same formula, with this m. Multi-latent "
        "attention multiplies all scores by the square of the divisor, whatever --rope-type is, "
        "as Megatron-Core does.", WEIGHT, idle_without=_YARN)
    yarn_exact_range: bool = flag(False,
        "YaRN's interpolation between the two kinds of frequencies begins and ends between "
        "channels; otherwise its ends are rounded outwards.", idle_without=_YARN,
        idle_with=_OTHERS)
# fmt: on


def rope_type_of(flags: Flags) -> RopeType:
    """Return how RoPE is scaled; for multi-latent attention YaRN is the default."""
    is_latent = flags[LatentFlags].multi_latent_attention
    return flags[RopeScalingFlags].rope_type or ("yarn" if is_latent else "rope")


def rope_scaling_fields(flags: Flags) -> dict[str, Any]:
    """Return the fields of ``ModelConfig`` about the scaling of RoPE, by name."""
    own = flags[RopeScalingFlags]
    values = {field.name: getattr(own, field.name) for field in fields(RopeScalingFlags)}
    return values | {"rope_type": rope_type_of(flags)}


def _two_scalings(flags: Flags) -> Iterator[str]:
    kind, is_latent = rope_type_of(flags), flags[LatentFlags].multi_latent_attention
    if flags[ModelFlags].use_rope_scaling and kind != "rope" and not is_latent:
        yield f"--rope-type {kind} and --use-rope-scaling scale the same frequencies: take one"


def _betas(flags: Flags) -> Iterator[str]:
    own = flags[RopeScalingFlags]
    if rope_type_of(flags) == "yarn" and own.beta_fast <= own.beta_slow:
        yield (
            f"--beta-fast {own.beta_fast:g} is not more than --beta-slow {own.beta_slow:g}: "
            "frequencies with more turns are the fast ones; raise the former"
        )


def _pairs(flags: Flags) -> Iterator[str]:
    model, kind = flags[ModelFlags], rope_type_of(flags)
    _, rotated = rotated_channels(flags)
    if kind == "rope" or flags[RopeScalingFlags].rotary_scaling_factor == 1:
        return
    if rotated < 4:
        yield (
            f"--rope-type {kind} scales some pairs of channels and not others, and {rotated} "
            "channels of a head turn: widen heads, or leave --rope-type out"
        )
    if kind == "yarn" and model.rotary_base == 1:
        yield "--rotary-base 1 gives all pairs one frequency, and --rope-type yarn needs several"


ROPE_SCALING_RULES: Final[tuple[Rule, ...]] = (_two_scalings, _betas, _pairs)
