"""Facts about the experts of a run."""

from megatron.checkpoint.settings import UpcyclingSettings
from megatron.flags.groups import Flags
from megatron.layers.experts.settings import ExpertSettings
from megatron.model.settings import ShapeSettings


def is_mixture(flags: Flags) -> bool:
    """Return whether tokens choose experts in some layers."""
    return flags[ExpertSettings].is_mixture


def upcycling_of(flags: Flags) -> int:
    """Return into how many experts upcycling divides an MLP; 0: checkpoints have experts."""
    own = flags[UpcyclingSettings]
    is_asked = own.moe_use_upcycling and is_mixture(flags)
    return own.moe_upcycling_granularity if is_asked else 0


def mixes_kinds(flags: Flags) -> bool:
    """Return whether some layers have experts and others have none."""
    layers = range(flags[ShapeSettings].num_layers)
    return len(set(map(flags[ExpertSettings].in_layer, layers))) > 1
