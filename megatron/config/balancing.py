"""The balance of experts: flags, rules, and the fields of ``ModelConfig`` that the flags decide."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Final

from megatron.config.experts import ExpertFlags, experts_of
from megatron.flags.declare import PROBABILITY, SHARE, WEIGHT, Range, flag
from megatron.flags.groups import Flags, Rule
from megatron.layers.experts.balance import LOSS_NAMES, Balance
from megatron.layers.experts.capacity import DropPolicy

_EXPERTS: Final = "--num-experts"
_TYPES: Final = "--moe-router-load-balancing-type"
_COEFF: Final = "--moe-aux-loss-coeff"
_CAPACITY: Final = "--moe-expert-capacity-factor"


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class BalancingFlags:
    """How the experts of a layer get equally many tokens."""

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
        "Change of an expert's bias after an iteration.",
        PROBABILITY, idle_without="--moe-router-enable-expert-bias")
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
        "(position).", idle_without=_CAPACITY)
# fmt: on


def balancing_fields(flags: Flags) -> dict[str, Any]:
    """Return the fields of the model about the balance of its experts, by name."""
    if experts_of(flags) is None:
        return {}
    given = flags[BalancingFlags]
    own = {field.name: getattr(given, field.name) for field in fields(BalancingFlags)}
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        if len(own[name]) == 1:
            [own[name]] = own[name]
    return own


def is_by_sinkhorn(flags: Flags) -> bool:
    """Return whether training balances the choices themselves."""
    return "sinkhorn" in flags[BalancingFlags].moe_router_load_balancing_type


def _types(flags: Flags) -> Iterator[str]:
    own = flags[BalancingFlags]
    types, coefficients = own.moe_router_load_balancing_type, own.moe_aux_loss_coeff
    if experts_of(flags) is None:
        return
    words = f"{_TYPES} {' '.join(types)}"
    if len(set(types)) < len(types):
        yield f"{words}: a type stands there twice; name each once"
    elif len(types) > 1 and not set(types) <= LOSS_NAMES.keys():
        yield f"{words}: only losses stand together, {', '.join(LOSS_NAMES)}; leave out the others"
    elif len(types) != len(coefficients) and any(coefficients):
        numbers = " ".join(map(str, coefficients))
        yield f"{_COEFF} {numbers} for {words}: give as many numbers as types, {len(types)}"


def _sinkhorn(flags: Flags) -> Iterator[str]:
    own, router = flags[BalancingFlags], flags[ExpertFlags]
    if experts_of(flags) is None or not is_by_sinkhorn(flags):
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


def _bias(flags: Flags) -> Iterator[str]:
    bias = "--moe-router-enable-expert-bias"
    if experts_of(flags) is None or not flags[BalancingFlags].moe_router_enable_expert_bias:
        return
    score = flags[ExpertFlags].moe_router_score_function
    if is_by_sinkhorn(flags):
        yield f"{bias} with {_TYPES} sinkhorn: both balance the choices; leave one of the two out"
    elif score != "sigmoid":
        yield (
            f"{bias} with --moe-router-score-function {score}: a bias joins scores between 0 and 1 "
            "of each expert by itself; take --moe-router-score-function sigmoid"
        )


def _no_gradient(flags: Flags) -> Iterator[str]:
    own = flags[ExpertFlags]
    by_softmax = own.moe_router_score_function == "softmax" and not own.moe_router_pre_softmax
    if experts_of(flags) is None or own.moe_router_topk != 1 or is_by_sinkhorn(flags):
        return
    if by_softmax:
        yield (
            "--moe-router-topk 1: a softmax over one chosen expert is 1, so the router has no "
            "gradient; add --moe-router-pre-softmax"
        )


def _nothing_balances(flags: Flags) -> Iterator[str]:
    own = flags[BalancingFlags]
    types, numbers = own.moe_router_load_balancing_type, own.moe_aux_loss_coeff
    if experts_of(flags) is None:
        return
    for kind, number in zip(types, numbers, strict=False):
        if kind in LOSS_NAMES and kind != "aux_loss" and not number:
            yield f"{_TYPES} {kind} changes nothing without {_COEFF}"
        if kind == "none" and number:
            yield f"{_COEFF} {number} changes nothing at {_TYPES} none"


def _chosen_otherwise(flags: Flags) -> Iterator[str]:
    """Flags of the ways to choose that sinkhorn replaces."""
    own = flags[ExpertFlags]
    if experts_of(flags) is None or not is_by_sinkhorn(flags):
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


BALANCING_RULES: Final[tuple[Rule, ...]] = (_types, _sinkhorn, _bias, _no_gradient)
"""The rules about the balance of experts; see ``megatron.config.topics``."""

BALANCING_NOTES: Final[tuple[Rule, ...]] = (_nothing_balances, _chosen_otherwise)
"""The rules that find flags about the balance that change nothing together with the others."""
