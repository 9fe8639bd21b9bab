"""Mixtures of experts: the rules about their sizes, their router and their balance; upcycling."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from megatron.flags.conditions import alternatives
from megatron.flags.declare import Declaration, flag
from megatron.flags.groups import Flags, all_declarations, options_of
from megatron.flags.ranges import COUNT
from megatron.flags.rules import notes, refuses
from megatron.layers.experts.balance import LOSS_NAMES
from megatron.layers.experts.settings import SHARED_EXPERT, BalanceSettings, ExpertSettings
from megatron.model.settings import ShapeSettings

_EXPERTS: Final = "--num-experts"
_TYPES: Final = "--moe-router-load-balancing-type"
_COEFF: Final = "--moe-aux-loss-coeff"
_CAPACITY: Final = "--moe-expert-capacity-factor"


@dataclass(frozen=True)
class UpcyclingFlags:
    """Experts that begin as copies of a dense model's MLP."""

    # fmt: off
    moe_use_upcycling: bool = flag(False,
        "--load has a dense model: each expert begins as a copy of its layer's MLP, and routers "
        "begin from --seed. The run begins at iteration 0 with weights alone, as with --finetune.",
        idle_without=_EXPERTS, needs="--load")
    moe_upcycling_granularity: int = flag(1,
        "With --moe-use-upcycling: parts into which an MLP is cut; an expert begins as one part.",
        COUNT,
        idle_without="--moe-use-upcycling")
    # fmt: on


def is_mixture(flags: Flags) -> bool:
    """Return whether tokens choose experts in some layers."""
    return flags[ExpertSettings].is_mixture


def upcycling_of(flags: Flags) -> int:
    """Return into how many experts upcycling divides an MLP; 0: checkpoints have experts."""
    own = flags[UpcyclingFlags]
    is_asked = own.moe_use_upcycling and is_mixture(flags)
    return own.moe_upcycling_granularity if is_asked else 0


def mixes_kinds(flags: Flags) -> bool:
    """Return whether some layers have experts and others have none."""
    layers = range(flags[ShapeSettings].num_layers)
    return len(set(map(flags[ExpertSettings].in_layer, layers))) > 1


def by_sinkhorn(flags: Flags) -> bool:
    """Return whether training balances the choices of experts themselves."""
    return is_mixture(flags) and flags[BalanceSettings].is_by_sinkhorn


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
def _upcycling(flags: Flags) -> Iterator[str]:
    own, parts = flags[ExpertSettings], upcycling_of(flags)
    experts = own.num_experts
    if not parts:
        return
    given = f"--moe-upcycling-granularity {parts}"
    if experts % parts or own.moe_router_topk % parts:
        yield (
            f"{given} does not divide --num-experts {experts} and --moe-router-topk "
            f"{own.moe_router_topk}: experts begin as parts of an MLP, and a token needs all parts"
        )
    if own.moe_shared_expert_intermediate_size:
        yield (
            f"--moe-use-upcycling with {SHARED_EXPERT} {own.moe_shared_expert_intermediate_size}: "
            "a dense model has no shared expert to begin with; leave one of them out"
        )


@notes
def _one_expert(flags: Flags) -> Iterator[str]:
    """Note every flag that would change nothing without experts."""
    if flags[ExpertSettings].num_experts != 1:
        return
    yield f"{_EXPERTS} 1 changes nothing: every token passes the same layers"
    declared = all_declarations(tuple(flags.groups))
    of_experts = _options_idle_without({_EXPERTS}, declared)
    for group, own in flags.groups.items():
        for option, value in options_of(group, own):
            if option in of_experts and declared[option].asks(value):
                yield f"{option} changes nothing at {_EXPERTS} 1"


def _options_idle_without(options: set[str], declared: Mapping[str, Declaration]) -> set[str]:
    """Return the flags that change nothing without ``options``, or without each other."""
    found = {
        option
        for option, own in declared.items()
        if option not in options
        and own.facts.idle_without
        and options.issuperset(one.split()[0] for one in alternatives(own.facts.idle_without))
    }
    return found | _options_idle_without(options | found, declared) if found else found


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
    if not by_sinkhorn(flags):
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
    if not own.is_mixture or own.moe_router_topk != 1 or by_sinkhorn(flags):
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
    if not by_sinkhorn(flags):
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
