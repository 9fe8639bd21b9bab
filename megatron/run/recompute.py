"""Recomputation as a dimension that a plan chooses in."""

from typing import Final

from megatron.flags.groups import Flags
from megatron.layers.recompute_settings import AUTO, RecomputeSettings
from megatron.layers.settings import MLPSettings
from megatron.run.dimension import Auto, Dimension
from megatron.run.edit import Choice, left_out, set_to
from megatron.run.experts import is_mixture

_GRANULARITY: Final = "--recompute-granularity"
_MODULES: Final = "--recompute-modules"
_METHOD: Final = "--recompute-method"
_LAYERS: Final = "--recompute-num-layers"
_FLAGS: Final = (_GRANULARITY, _MODULES, _METHOD, _LAYERS)
EVERY_LAYER: Final = "--recompute-granularity full --recompute-method uniform"
"""The flags with which every layer is computed again, from its input."""


def _choices(flags: Flags) -> list[Choice]:
    """Return no recomputation, that of parts of layers, and that of whole layers.

    Parts are those that the flags name. Else they are the norms and activation functions, which
    take almost no time, or MLPs: they keep the most, and attention takes most of the time of long
    sequences.
    """
    own = flags[RecomputeSettings]
    named = own.recompute_modules
    mixtures = is_mixture(flags)
    active = ["mlp_act"] * (flags[MLPSettings].activation != "squared_relu") + [
        "moe_act"
    ] * mixtures
    quick, whole = ("layernorm", *active), ("mlp", *["moe"] * mixtures)
    layers = own.recompute_num_layers
    full = (
        set_to(_GRANULARITY, "full"),
        set_to(_METHOD, own.recompute_method or "uniform"),
        *(() if layers is None else (set_to(_LAYERS, layers),)),
        left_out(_MODULES),
    )
    return [
        tuple(map(left_out, _FLAGS)),
        *(_of_parts(parts) for parts in ([named] if named else [quick, whole])),
        full,
    ]


def _of_parts(parts: tuple[str, ...]) -> Choice:
    selective = set_to(_GRANULARITY, "selective"), set_to(_MODULES, *parts)
    return (*selective, left_out(_METHOD), left_out(_LAYERS))


RECOMPUTATION: Final = Dimension(
    "recomputation",
    "factor",
    _FLAGS,
    _choices,
    auto=Auto(AUTO, lambda flags: flags[RecomputeSettings].recompute_granularity == "auto"),
    nothing="no recomputation",
)
"""Recomputation as a dimension that the plan chooses in."""
