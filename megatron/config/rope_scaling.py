"""Scalings of RoPE for longer samples: YaRN and dynamic NTK scaling. Flags and rules."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Final

from megatron.config.model import ModelFlags
from megatron.flags.declare import COUNT, LENGTH, NOT_NEGATIVE, POSITIVE, flag
from megatron.flags.groups import Flags, Rule
from megatron.model.config import RopeType

_SCALED: Final = "--rope-type yarn or --rope-type dynamic"
_YARN: Final = "--rope-type yarn"


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class RopeScalingFlags:
    """RoPE for samples longer than those of the original training."""

    rope_type: RopeType | None = flag(None,
        "yarn: divide RoPE's low frequencies, and lengthen queries and keys (YaRN); dynamic: raise "
        "theta in samples of more than --original-max-position-embeddings tokens (dynamic NTK "
        "scaling); rope: neither.", unset="rope",
        idle_without="--position-embedding-type rope")
    rotary_scaling_factor: float = flag(1.0,
        "With yarn: divisor of the lowest frequencies. With dynamic: the lowest frequency is "
        "divided by F L / O - (F - 1) with this factor F, --seq-length L and "
        "--original-max-position-embeddings O.", COUNT, idle_without=_SCALED)
    original_max_position_embeddings: int = flag(4096,
        "Tokens of a sample in the original training.", LENGTH, idle_without=_SCALED)
    beta_fast: float = flag(32.0,
        "YaRN keeps the frequencies with this many turns or more in a sample of the original "
        "training.", POSITIVE, idle_without=_YARN)
    beta_slow: float = flag(1.0,
        "YaRN divides the frequencies with this many turns or fewer by --rotary-scaling-factor.",
        POSITIVE, idle_without=_YARN)
    mscale: float = flag(1.0,
        "YaRN lengthens what turns by 1 + 0.1 m log(--rotary-scaling-factor), with this m.",
        NOT_NEGATIVE, idle_without=_YARN)
    mscale_all_dim: float = flag(0.0,
        "YaRN divides that length by the same formula, with this m.", NOT_NEGATIVE,
        idle_without=_YARN)
    yarn_exact_range: bool = flag(False,
        "YaRN's interpolation between the two kinds of frequencies begins and ends between "
        "channels; otherwise its ends are rounded outwards.", idle_without=_YARN)
# fmt: on


def rope_scaling_fields(flags: Flags) -> dict[str, Any]:
    """Return the fields of ``ModelConfig`` about the scaling of RoPE, by name."""
    own = flags[RopeScalingFlags]
    values = {field.name: getattr(own, field.name) for field in fields(RopeScalingFlags)}
    return values | {"rope_type": own.rope_type or "rope"}


def _two_scalings(flags: Flags) -> Iterator[str]:
    kind = flags[RopeScalingFlags].rope_type
    if flags[ModelFlags].use_rope_scaling and kind not in (None, "rope"):
        yield f"--rope-type {kind} and --use-rope-scaling scale the same frequencies: take one"


def _betas(flags: Flags) -> Iterator[str]:
    own = flags[RopeScalingFlags]
    if own.rope_type == "yarn" and own.beta_fast <= own.beta_slow:
        yield (
            f"--beta-fast {own.beta_fast:g} is not more than --beta-slow {own.beta_slow:g}: "
            "frequencies with more turns are the fast ones; raise the former"
        )


def _pairs(flags: Flags) -> Iterator[str]:
    model, kind = flags[ModelFlags], flags[RopeScalingFlags].rope_type
    head = model.kv_channels or model.hidden_size // model.num_attention_heads
    if kind in ("yarn", "dynamic") and int(head * model.rotary_percent) < 4:
        yield (
            f"--rope-type {kind} scales some pairs of channels and not others, and a head has one "
            "pair: widen it with --kv-channels, or leave out --rope-type"
        )
    if kind == "yarn" and model.rotary_base == 1:
        yield "--rotary-base 1 gives all pairs one frequency, and --rope-type yarn needs several"


ROPE_SCALING_RULES: Final[tuple[Rule, ...]] = (_two_scalings, _betas, _pairs)
