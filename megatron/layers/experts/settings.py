"""The settings of a mixture of experts: its sizes, its router and its balance."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch

from megatron.flags.declare import derived, flag
from megatron.flags.groups import Flags
from megatron.flags.ranges import COUNT, FACTOR, PROBABILITY, SHARE, WEIGHT, WIDTH, Range
from megatron.flags.rules import notes, refuses
from megatron.layers.experts.balance import LOSS_NAMES, Balance
from megatron.layers.experts.capacity import Capacity, DropPolicy
from megatron.layers.patterns import LayerPattern
from megatron.layers.settings import PATTERN

Score: TypeAlias = Literal["softmax", "sigmoid"]
"""Of an expert: by a softmax over all experts, or by its own sigmoid."""

_EXPERTS: Final = "--num-experts"
_TYPES: Final = "--moe-router-load-balancing-type"
_COEFF: Final = "--moe-aux-loss-coeff"
_CAPACITY: Final = "--moe-expert-capacity-factor"

SHARED_EXPERT: Final = "--moe-shared-expert-intermediate-size"
"""The flag of the width of an expert that all tokens pass."""


@dataclass(frozen=True)
class BalanceSettings:
    """How the experts of a layer get equally many tokens."""

    # fmt: off
    moe_router_load_balancing_type: tuple[Balance, ...] = flag(("aux_loss",),
        "What balances the experts. A loss with --moe-aux-loss-coeff that compares the tokens of a "
        "microbatch (aux_loss), of every sequence (seq_aux_loss) or of the global batch so far "
        "(global_aux_loss); several losses may stand together. sinkhorn: training balances the "
        "choices themselves. none: nothing, or only --moe-router-enable-expert-bias.",
        idle_without=_EXPERTS)
    moe_aux_loss_coeff: tuple[float, ...] = flag((0.0,),
        "Coefficient of the balancing loss; of several losses, one for each.", WEIGHT,
        idle_without=_EXPERTS)
    moe_z_loss_coeff: float = flag(0.0,
        "Coefficient of the router's mean squared log-partition, which keeps its logits small.",
        WEIGHT, idle_without=_EXPERTS)
    moe_router_enable_expert_bias: bool = flag(False,
        "A bias of every expert joins the scores for the choice, not for the weights; after every "
        "iteration it grows for experts with few tokens and shrinks for the others.",
        idle_without=_EXPERTS)
    moe_router_bias_update_rate: float = flag(1e-3,
        "Change of an expert's bias after an iteration.", PROBABILITY,
        idle_without="--moe-router-enable-expert-bias")
    moe_router_force_load_balancing: bool = flag(False,
        "For benchmarks: random logits take the place of the router's, so that all experts have "
        "about equally many tokens.", idle_without=_EXPERTS)
    moe_input_jitter_eps: float = flag(0.0,
        "In training the router's input is multiplied by uniform noise between 1 - EPS and "
        "1 + EPS.", SHARE, metavar="EPS", idle_without=_EXPERTS)
    moe_expert_capacity_factor: float | None = flag(None,
        "An expert takes this many times the mean number of tokens of an expert in a microbatch; "
        "choices beyond that add nothing.", Range(0.01, 1e4), unset="no limit",
        idle_without=_EXPERTS)
    moe_token_drop_policy: DropPolicy = flag("probs",
        "Which choices a full expert keeps: those with the largest weights, or the first ones "
        "(position).", idle_without="--moe-expert-capacity-factor")
    # fmt: on

    @property
    def is_by_sinkhorn(self) -> bool:
        """Whether training balances the choices themselves."""
        return "sinkhorn" in self.moe_router_load_balancing_type

    @property
    def coefficients(self) -> tuple[tuple[Balance, float], ...]:
        """What balances the experts, each with its coefficient."""
        kinds, numbers = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        return tuple(zip(kinds, numbers if len(numbers) > 1 else numbers * len(kinds), strict=True))

    @property
    def losses(self) -> dict[Balance, float]:
        """The balancing losses with their coefficients."""
        return {kind: factor for kind, factor in self.coefficients if kind in LOSS_NAMES and factor}

    @property
    def capacity(self) -> Capacity | None:
        """How many tokens an expert takes; ``None``: all that choose it."""
        factor = self.moe_expert_capacity_factor
        return None if factor is None else Capacity(factor, self.moe_token_drop_policy)


@dataclass(frozen=True)
class ExpertSettings:
    """A mixture of experts in the place of the MLP."""

    # fmt: off
    num_experts: int = flag(0,
        "Experts of a layer, each an MLP; a router sends every token to --moe-router-topk of them.",
        Range(1, WIDTH.most, or_zero=True), unset="no layer has experts")
    moe_layer_freq: LayerPattern = flag(LayerPattern(every=1),
        "Every N-th layer has experts, the first one of each N; or a list with 1 for each layer "
        "that has them, as in '[0]*3+[1]*58'.", metavar=PATTERN, reads=LayerPattern.read,
        idle_without=_EXPERTS)
    moe_ffn_hidden_size: int = derived("Width of an expert.", WIDTH, unset="--ffn-hidden-size",
        idle_without=_EXPERTS)
    moe_router_topk: int = flag(2, "Experts of a token.", COUNT, idle_without=_EXPERTS)
    moe_router_score_function: Score = flag("softmax",
        "A token's score of an expert: by a softmax over all experts, or by its own sigmoid.",
        idle_without=_EXPERTS)
    moe_router_pre_softmax: bool = flag(False,
        "The softmax is over all experts, not over those that the token has chosen.",
        idle_without=_EXPERTS, idle_with="--moe-router-score-function sigmoid")
    moe_router_num_groups: int | None = flag(None,
        "Groups of experts; a token chooses from the best --moe-router-group-topk of them.", COUNT,
        unset="one group", idle_without=_EXPERTS, needs="--moe-router-group-topk")
    moe_router_group_topk: int | None = flag(None, "Groups that a token may choose from.", COUNT,
        unset="all of them", idle_without=_EXPERTS, needs="--moe-router-num-groups")
    moe_router_group_best: int | None = flag(None,
        "Best experts of a group whose scores together are the group's; DeepSeek-V2 has 1.", COUNT,
        unset="--moe-router-topk / --moe-router-group-topk", idle_without=_EXPERTS,
        needs="--moe-router-group-topk")
    moe_router_topk_scaling_factor: float = flag(1.0, "Factor of the weights of chosen experts.",
        FACTOR, idle_without=_EXPERTS)
    moe_router_dtype: Literal["fp32", "fp64"] | None = flag(None,
        "Type of the router's product; with fp64 its scores and losses are in fp64, too.",
        unset="the type of activations", idle_without=_EXPERTS)
    moe_shared_expert_intermediate_size: int = flag(0, "Width of an expert that all tokens pass.",
        Range(1, WIDTH.most, or_zero=True), unset="there is none", idle_without=_EXPERTS)
    moe_shared_expert_gate: bool = flag(False,
        "A sigmoid of the token multiplies the output of the shared expert.", idle_without=_EXPERTS,
        needs=SHARED_EXPERT)
    # fmt: on

    @property
    def is_mixture(self) -> bool:
        """Whether tokens choose experts: one expert would be the same layer for all of them."""
        return self.num_experts > 1

    def in_layer(self, layer: int) -> bool:
        """Return whether a layer has experts in the place of its MLP.

        Args:
            layer: index in the whole model, from 0.
        """
        return self.is_mixture and bool(self.moe_layer_freq.entry(layer, first=True))

    @property
    def dtype(self) -> torch.dtype | None:
        """Type of the router's product, if it may be wider than activations."""
        dtypes = {"fp32": torch.float32, "fp64": torch.float64}
        return None if self.moe_router_dtype is None else dtypes[self.moe_router_dtype]


def _by_sinkhorn(flags: Flags) -> bool:
    """Return whether training balances the choices of experts themselves."""
    return flags[ExpertSettings].is_mixture and flags[BalanceSettings].is_by_sinkhorn


@refuses
def _choices(flags: Flags) -> Iterator[str]:
    own = flags[ExpertSettings]
    experts = own.num_experts
    if own.is_mixture and own.moe_router_topk > experts:
        yield (
            f"--moe-router-topk {own.moe_router_topk} is more than --num-experts {experts}: a "
            "token cannot choose an expert twice; lower it"
        )


@refuses
def _groups(flags: Flags) -> Iterator[str]:
    own = flags[ExpertSettings]
    experts, topk = own.num_experts, own.moe_router_topk
    groups, chosen = own.moe_router_num_groups, own.moe_router_group_topk
    if not own.is_mixture or groups is None or chosen is None:
        return
    if experts % groups:
        yield (
            f"--moe-router-num-groups {groups} does not divide --num-experts {experts}: every "
            "group has as many experts"
        )
    elif chosen > groups:
        yield (
            f"--moe-router-group-topk {chosen} is more than --moe-router-num-groups {groups}: "
            "lower it"
        )
    elif topk % chosen or topk // chosen > experts // groups:
        yield (
            f"--moe-router-topk {topk} cannot come from --moe-router-group-topk {chosen} groups of "
            f"{experts // groups} experts, as many from each: choose a multiple of {chosen}, up to "
            f"{chosen * (experts // groups)}"
        )
    best = own.moe_router_group_best
    if best is not None and best > experts // groups:
        yield (
            f"--moe-router-group-best {best} is more than the {experts // groups} experts of a "
            "group: lower it"
        )


@refuses
def _types(flags: Flags) -> Iterator[str]:
    own = flags[BalanceSettings]
    types, coefficients = own.moe_router_load_balancing_type, own.moe_aux_loss_coeff
    if not flags[ExpertSettings].is_mixture:
        return
    words = f"{_TYPES} {' '.join(types)}"
    if len(set(types)) < len(types):
        yield f"{words}: a type stands there twice; name each once"
    elif len(types) > 1 and not set(types) <= LOSS_NAMES.keys():
        yield f"{words}: only losses stand together, {', '.join(LOSS_NAMES)}; leave out the others"
    elif len(types) != len(coefficients) and any(coefficients):
        numbers = " ".join(map(str, coefficients))
        yield f"{_COEFF} {numbers} for {words}: give as many numbers as types, {len(types)}"


@refuses
def _sinkhorn(flags: Flags) -> Iterator[str]:
    own, router = flags[BalanceSettings], flags[ExpertSettings]
    if not _by_sinkhorn(flags):
        return
    if any(own.moe_aux_loss_coeff):
        numbers = " ".join(map(str, own.moe_aux_loss_coeff))
        yield (
            f"{_COEFF} {numbers} with {_TYPES} sinkhorn: choices that are balanced already have no "
            "balancing loss; leave it out"
        )
    if own.moe_expert_capacity_factor is not None:
        yield (
            f"{_CAPACITY} {own.moe_expert_capacity_factor} with {_TYPES} sinkhorn: only choices by "
            "scores alone are dropped; leave one of the two out"
        )
    if router.moe_router_num_groups is not None:
        yield (
            f"--moe-router-num-groups {router.moe_router_num_groups} with {_TYPES} sinkhorn: "
            "choices are balanced over all experts; leave one of the two out"
        )


@refuses
def _bias(flags: Flags) -> Iterator[str]:
    bias, own = "--moe-router-enable-expert-bias", flags[BalanceSettings]
    if not flags[ExpertSettings].is_mixture or not own.moe_router_enable_expert_bias:
        return
    score = flags[ExpertSettings].moe_router_score_function
    if own.is_by_sinkhorn:
        yield f"{bias} with {_TYPES} sinkhorn: both balance the choices; leave one of the two out"
    elif score != "sigmoid":
        yield (
            f"{bias} with --moe-router-score-function {score}: a bias joins scores between 0 and 1 "
            "of each expert by itself; take --moe-router-score-function sigmoid"
        )


@refuses
def _no_gradient(flags: Flags) -> Iterator[str]:
    own = flags[ExpertSettings]
    by_softmax = own.moe_router_score_function == "softmax" and not own.moe_router_pre_softmax
    if not own.is_mixture or own.moe_router_topk != 1 or _by_sinkhorn(flags):
        return
    if by_softmax:
        yield (
            "--moe-router-topk 1: a softmax over one chosen expert is 1, so the router has no "
            "gradient; add --moe-router-pre-softmax"
        )


@notes
def _nothing_balances(flags: Flags) -> Iterator[str]:
    own = flags[BalanceSettings]
    types, numbers = own.moe_router_load_balancing_type, own.moe_aux_loss_coeff
    if not flags[ExpertSettings].is_mixture:
        return
    for kind, number in zip(types, numbers, strict=False):
        if kind in LOSS_NAMES and kind != "aux_loss" and not number:
            yield f"{_TYPES} {kind} changes nothing without {_COEFF}"
        if kind == "none" and number:
            yield f"{_COEFF} {number} changes nothing at {_TYPES} none"


@notes
def _chosen_otherwise(flags: Flags) -> Iterator[str]:
    """Flags of the ways to choose that sinkhorn replaces."""
    own = flags[ExpertSettings]
    if not _by_sinkhorn(flags):
        return
    asked = {
        "--moe-router-score-function sigmoid": own.moe_router_score_function == "sigmoid",
        "--moe-router-pre-softmax": own.moe_router_pre_softmax,
        f"--moe-router-topk-scaling-factor {own.moe_router_topk_scaling_factor}": (
            own.moe_router_topk_scaling_factor != 1
        ),
    }
    for words, is_asked in asked.items():
        if is_asked:
            yield f"{words} changes nothing at {_TYPES} sinkhorn, which has scores of its own"
