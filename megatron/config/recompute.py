"""Recomputation: its flags and rules, and the ``Recomputation`` that they make."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from megatron.config.dimension import Dimension, NamedChoice
from megatron.config.edit import left_out, set_to
from megatron.config.experts import is_mixture
from megatron.flags.declare import flag
from megatron.flags.groups import Flags
from megatron.flags.ranges import COUNT, DEPTH
from megatron.flags.readable import nearest
from megatron.flags.rules import notes, refuses
from megatron.layers.recompute import NO_RECOMPUTATION, PARTS, Recomputation
from megatron.layers.settings import LatentAttentionSettings, MLPSettings

_GRANULARITY: Final = "--recompute-granularity"
_MODULES: Final = "--recompute-modules"
_METHOD: Final = "--recompute-method"
_LAYERS: Final = "--recompute-num-layers"
_FLAGS: Final = (_GRANULARITY, _MODULES, _METHOD, _LAYERS)
_FULL: Final = "--recompute-granularity full"
_SELECTIVE: Final = "--recompute-granularity selective or --recompute-activations"
_AUTO: Final = "--recompute-granularity auto"
EVERY_LAYER: Final = "--recompute-granularity full --recompute-method uniform"
"""The flags with which every layer is computed again, from its input."""

_ELSEWHERE: Final = {
    "shared_experts": "take moe, which computes all of a mixture again",
}
"""For each module of Megatron-LM that models do not have here, the way out or the reason."""


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class RecomputeFlags:
    """What the backward computes again instead of keeping it."""

    recompute_activations: bool = flag(False, "The same as --recompute-granularity selective.",
        excludes=f"{_FULL} or {_AUTO}")
    recompute_granularity: Literal["selective", "full", "auto"] | None = flag(None,
        "full: whole layers are computed again, in groups, from the input of each group. "
        "selective: only the parts of each layer that --recompute-modules names. auto: nothing, "
        "norms and activation functions, MLPs, or whole layers (or nothing, the parts that "
        "--recompute-modules names, or whole layers), whichever makes the "
        "run the fastest that fits the job's GPUs by prediction, or one nearly as fast that holds "
        "less.",
        unset="no recomputation")
    recompute_modules: tuple[str, ...] = flag((),
        "With selective: the parts that are computed again. core_attn: attention between its two "
        "projections; mla_up_proj: the heads of multi-latent attention; layernorm: the two norms; "
        "mlp: the MLP; mlp_act (not in Megatron-LM): only the activation function of the MLP or of "
        "shared experts; moe: the mixture of experts in the MLP's place; moe_act: only the "
        "activation functions of its experts.", unset="core_attn",
        metavar="{" + ",".join(PARTS) + "} ...", idle_without=f"{_SELECTIVE} or {_AUTO}")
    recompute_method: Literal["uniform", "block"] | None = flag(None,
        "With full. uniform: all layers of a chunk, in groups of --recompute-num-layers. block: "
        "the first --recompute-num-layers layers of every chunk, one by one.",
        unset="required with full", idle_without=f"{_FULL} or {_AUTO}", excludes=_SELECTIVE)
    recompute_num_layers: int | None = flag(None,
        "With uniform: layers of a group. With block: layers of every chunk that are computed "
        "again.", DEPTH, unset="1",
        idle_without=f"{_FULL} or {_AUTO}", excludes=_SELECTIVE)
    recompute_ahead: int | None = flag(None,
        "Compute whole layers again in a pass of its own (R). R need not wait for the gradient, "
        "as B must. A rank may hold this many chunks between R and B.", COUNT, unset="within B",
        metavar="CHUNKS", needs=_FULL, lack="moves whole layers, and none is computed again")
# fmt: on


def is_selective(flags: RecomputeFlags) -> bool:
    """Return whether the flags ask to compute parts of layers again."""
    return flags.recompute_activations or flags.recompute_granularity == "selective"


def _may_be_selective(flags: RecomputeFlags) -> bool:
    return is_selective(flags) or flags.recompute_granularity == "auto"


def recomputation_of(flags: RecomputeFlags) -> Recomputation:
    """Return the recomputation that flags without a mistake ask for."""
    if is_selective(flags):
        named = flags.recompute_modules or ("core_attn",)
        return Recomputation(parts=frozenset(part for part in PARTS if part in named))
    if flags.recompute_granularity is None:
        return NO_RECOMPUTATION
    layers = flags.recompute_num_layers or 1
    if flags.recompute_method == "block":
        return Recomputation(group=1, most=layers)
    return Recomputation(group=layers)


@refuses
def _modules(flags: Flags) -> Iterator[str]:
    if not _may_be_selective(flags[RecomputeFlags]):
        return
    for name in flags[RecomputeFlags].recompute_modules:
        if name not in PARTS:
            why = _ELSEWHERE.get(name, "no part of a layer has this name")
            near = "" if name in _ELSEWHERE else nearest(name, PARTS)
            yield f"--recompute-modules {name}: {near}{why}; take some of {', '.join(PARTS)}"
        elif name == "mla_up_proj" and not flags[LatentAttentionSettings].multi_latent_attention:
            yield f"--recompute-modules {name} has no such part without --multi-latent-attention"


@refuses
def _method(flags: Flags) -> Iterator[str]:
    asked = flags[RecomputeFlags]
    if asked.recompute_granularity == "full" and asked.recompute_method is None:
        yield (
            "--recompute-granularity full does not say which layers: add --recompute-method "
            "uniform for all of them, or block for the first --recompute-num-layers of every chunk"
        )


@notes
def _twice(flags: Flags) -> Iterator[str]:
    own = flags[RecomputeFlags]
    for whole in ("mlp", "moe") if _may_be_selective(own) else ():
        if {whole, f"{whole}_act"} <= set(own.recompute_modules):
            yield (
                f"--recompute-modules {whole}_act changes nothing beside {whole}, which computes "
                "it again too"
            )


@notes
def _kept_anyway(flags: Flags) -> Iterator[str]:
    own = flags[RecomputeFlags]
    asked = _may_be_selective(own) and "mlp_act" in own.recompute_modules
    if asked and flags[MLPSettings].activation == "squared_relu":
        yield (
            "--recompute-modules mlp_act changes nothing with --squared-relu, whose backward reads "
            "its result"
        )


@notes
def _no_experts(flags: Flags) -> Iterator[str]:
    own = flags[RecomputeFlags]
    for name in own.recompute_modules if _may_be_selective(own) else ():
        if name.startswith("moe") and not is_mixture(flags):
            yield f"--recompute-modules {name} changes nothing without --num-experts"


def _choices(flags: Flags) -> list[NamedChoice]:
    """Return no recomputation, that of parts of layers, and that of whole layers.

    Parts are those that the flags name. Else they are the norms and activation functions, which
    take almost no time, or MLPs: they keep the most, and attention takes most of the time of long
    sequences.
    """
    own = flags[RecomputeFlags]
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
        NamedChoice(tuple(map(left_out, _FLAGS)), "no recomputation"),
        *(_of_parts(parts) for parts in ([named] if named else [quick, whole])),
        NamedChoice(full),
    ]


def _of_parts(parts: tuple[str, ...]) -> NamedChoice:
    selective = set_to(_GRANULARITY, "selective"), set_to(_MODULES, *parts)
    return NamedChoice((*selective, left_out(_METHOD), left_out(_LAYERS)))


RECOMPUTATION: Final = Dimension(
    _AUTO, lambda flags: flags[RecomputeFlags].recompute_granularity == "auto", _choices
)
"""Recomputation as a dimension that the plan chooses in."""
