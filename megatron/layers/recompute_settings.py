"""The settings of recomputation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from megatron.flags.declare import flag
from megatron.flags.groups import Flags
from megatron.flags.ranges import COUNT, DEPTH
from megatron.flags.readable import nearest
from megatron.flags.rules import notes, refuses
from megatron.layers.experts.settings import ExpertSettings
from megatron.layers.recompute import NO_RECOMPUTATION, PARTS, Recomputation
from megatron.layers.settings import LatentAttentionSettings, MLPSettings

FULL: Final = "--recompute-granularity full"
AUTO: Final = "--recompute-granularity auto"
_SELECTIVE: Final = "--recompute-granularity selective or --recompute-activations"
_ELSEWHERE: Final = {
    "shared_experts": "take moe, which computes all of a mixture again",
}
"""For each module of Megatron-LM that models do not have here, the way out or the reason."""


@dataclass(frozen=True)
class RecomputeSettings:
    """Activations that the backward computes again, so that no rank keeps them."""

    # fmt: off
    recompute_activations: bool = flag(False, "The same as --recompute-granularity selective.",
        excludes=f"{FULL} or {AUTO}")
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
        metavar="{" + ",".join(PARTS) + "} ...", idle_without=f"{_SELECTIVE} or {AUTO}")
    recompute_method: Literal["uniform", "block"] | None = flag(None,
        "With full. uniform: all layers of a chunk, in groups of --recompute-num-layers. block: "
        "the first --recompute-num-layers layers of every chunk, one by one.",
        unset="required with full", idle_without=f"{FULL} or {AUTO}", excludes=_SELECTIVE)
    recompute_num_layers: int | None = flag(None,
        "With uniform: layers of a group. With block: layers of every chunk that are computed "
        "again.", DEPTH, unset="1",
        idle_without=f"{FULL} or {AUTO}", excludes=_SELECTIVE)
    recompute_ahead: int | None = flag(None,
        "Compute whole layers again in a pass of its own (R). R need not wait for the gradient, "
        "as B must. A rank may hold this many chunks between R and B.", COUNT, unset="within B",
        metavar="CHUNKS", needs=FULL, lack="moves whole layers, and none is computed again")
    # fmt: on

    @property
    def is_selective(self) -> bool:
        """Whether the flags ask to compute parts of layers again."""
        return self.recompute_activations or self.recompute_granularity == "selective"

    @property
    def may_be_selective(self) -> bool:
        """Whether the flags ask for that, or let a plan choose it."""
        return self.is_selective or self.recompute_granularity == "auto"

    @property
    def recomputation(self) -> Recomputation:
        """The recomputation that faultless flags ask for."""
        if self.is_selective:
            named = self.recompute_modules or ("core_attn",)
            return Recomputation(parts=frozenset(part for part in PARTS if part in named))
        if self.recompute_granularity is None:
            return NO_RECOMPUTATION
        layers = self.recompute_num_layers or 1
        if self.recompute_method == "block":
            return Recomputation(group=1, most=layers)
        return Recomputation(group=layers)


@refuses
def _modules(flags: Flags) -> Iterator[str]:
    if not flags[RecomputeSettings].may_be_selective:
        return
    for name in flags[RecomputeSettings].recompute_modules:
        if name not in PARTS:
            why = _ELSEWHERE.get(name, "no part of a layer has this name")
            near = "" if name in _ELSEWHERE else nearest(name, PARTS)
            yield f"--recompute-modules {name}: {near}{why}; take some of {', '.join(PARTS)}"
        elif name == "mla_up_proj" and not flags[LatentAttentionSettings].multi_latent_attention:
            yield f"--recompute-modules {name} has no such part without --multi-latent-attention"


@refuses
def _method(flags: Flags) -> Iterator[str]:
    asked = flags[RecomputeSettings]
    if asked.recompute_granularity == "full" and asked.recompute_method is None:
        yield (
            "--recompute-granularity full does not say which layers: add --recompute-method "
            "uniform for all of them, or block for the first --recompute-num-layers of every chunk"
        )


@notes
def _twice(flags: Flags) -> Iterator[str]:
    own = flags[RecomputeSettings]
    for whole in ("mlp", "moe") if own.may_be_selective else ():
        if {whole, f"{whole}_act"} <= set(own.recompute_modules):
            yield (
                f"--recompute-modules {whole}_act changes nothing beside {whole}, which computes "
                "it again too"
            )


@notes
def _kept_anyway(flags: Flags) -> Iterator[str]:
    own = flags[RecomputeSettings]
    asked = own.may_be_selective and "mlp_act" in own.recompute_modules
    if asked and flags[MLPSettings].activation == "squared_relu":
        yield (
            "--recompute-modules mlp_act changes nothing with --squared-relu, whose backward reads "
            "its result"
        )


@notes
def _no_experts(flags: Flags) -> Iterator[str]:
    own = flags[RecomputeSettings]
    for name in own.recompute_modules if own.may_be_selective else ():
        if name.startswith("moe") and not flags[ExpertSettings].is_mixture:
            yield f"--recompute-modules {name} changes nothing without --num-experts"
