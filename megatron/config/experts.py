"""Mixtures of experts: flags, rules, and the fields of ``ModelConfig`` that the flags decide."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from megatron.config.layer_patterns import parse_pattern, words_of_pattern
from megatron.config.model import ModelFlags
from megatron.flags.declare import (
    COUNT,
    FACTOR,
    RANKS,
    WIDTH,
    flag,
    option_of,
)
from megatron.flags.groups import Flags, Rule, all_declarations, faults_of, options_of
from megatron.layers.experts.router import Score
from megatron.model.config import ModelConfig, Pattern
from megatron.schedules.catalogue import PAIRED_SCHEDULES

_EXPERTS: Final = "--num-experts"
_OPTIONS: Final = {
    "moe_layer_pattern": "--moe-layer-freq",
    "moe_router_in_fp32": "--moe-router-dtype",
    "moe_router_in_fp64": "--moe-router-dtype",
}
"""For each field whose flag has another name, the flag."""

GROUPED: Final = "--moe-grouped-products"
"""The flag that says what multiplies experts."""

SHARED_EXPERT: Final = "--moe-shared-expert-intermediate-size"
"""The flag of the width of an expert that all tokens pass."""


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class ExpertFlags:
    """A mixture of experts in the place of the MLP."""

    num_experts: int | None = flag(None,
        "Experts of a layer, each an MLP; a router sends every token to --moe-router-topk of them.",
        WIDTH, unset="no layer has experts")
    moe_layer_freq: str = flag("1",
        "Every N-th layer has experts, the first one of each N; or a list with 1 for each layer "
        "that has them, as in '[0]*3+[1]*58'.", metavar="N|[0,1,...]", idle_without=_EXPERTS)
    moe_ffn_hidden_size: int | None = flag(None, "Width of an expert.", WIDTH,
        unset="--ffn-hidden-size", idle_without=_EXPERTS)
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
    moe_shared_expert_intermediate_size: int | None = flag(None,
        "Width of an expert that all tokens pass.", WIDTH, unset="there is none",
        idle_without=_EXPERTS)
    moe_shared_expert_gate: bool = flag(False,
        "A sigmoid of the token multiplies the output of the shared expert.", idle_without=_EXPERTS,
        needs=SHARED_EXPERT)
    moe_use_upcycling: bool = flag(False,
        "--load has a dense model: each expert begins as a copy of its layer's MLP, and routers "
        "begin from --seed. The run begins at iteration 0 with weights alone, as with --finetune.",
        idle_without=_EXPERTS, needs="--load")
    moe_upcycling_granularity: int = flag(1,
        "With --moe-use-upcycling: parts into which an MLP is cut; an expert begins as one part.",
        COUNT,
        idle_without="--moe-use-upcycling")
    expert_model_parallel_size: int = flag(1,
        "Ranks over which the experts of a layer are spread, each with equally many. They are "
        "tensor-, context- or data-parallel ranks of a stage, which have different tokens.", RANKS,
        idle_without=_EXPERTS)
    expert_tensor_parallel_size: int | None = flag(None,
        "Ranks that share an expert, by its columns.", RANKS,
        unset="--tensor-model-parallel-size", idle_without=_EXPERTS)
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = flag("allgather",
        "How tokens come to experts on other ranks. allgather: these ranks get all tokens of each "
        "other. alltoall: a token goes to the ranks of its experts only; the host waits until they "
        "have told each other how many tokens come. flex: by the package DeepEP, on GPUs in bf16; "
        "a token goes once to each rank of its experts, and the host waits as with alltoall.",
        idle_without=_EXPERTS)
    moe_grouped_products: Literal["local", "transformer_engine", "grouped_gemm"] = flag("local",
        "What multiplies experts in 16 bits and fp32: PyTorch and this project's kernels (local), "
        "or a package: Transformer Engine (16 bits) or grouped_gemm (bf16). For a package the host "
        "waits once a layer and microbatch to learn how many tokens each expert has.",
        idle_without=_EXPERTS)
    overlap_moe_expert_parallel_comm: bool = flag(False,
        "Join each forward with a backward that stands near it in the plan, where no iteration "
        "becomes longer: each works while tokens of the other travel to experts and back. A rank "
        "may then hold one microbatch more, or as many as --zero-bubble-max-pending-backward "
        "allows. "
        f"--pipeline-schedule {' or '.join(PAIRED_SCHEDULES)} is made for it.",
        idle_without=_EXPERTS)
    delay_wgrad_compute: bool = flag(False,
        "Make weight gradients passes of their own (W), after the pair of their backward, in "
        "schedules that do not split the backward either.",
        idle_without="--overlap-moe-expert-parallel-comm")
# fmt: on


def expert_fields(flags: Flags, ffn_hidden_size: int) -> dict[str, Any]:
    """Return the fields of the model about its experts, by name, without those of their balance.

    Args:
        flags: flags of a command line.
        ffn_hidden_size: width of the model's MLP.
    """
    own = flags[ExpertFlags]
    if experts_of(flags) is None:
        return {
            field.name: field.default
            for field in fields(ModelConfig)
            if is_about_experts(field.name)
        }
    return {
        "num_experts": experts_of(flags),
        "moe_layer_pattern": expert_pattern(flags),
        "moe_ffn_hidden_size": own.moe_ffn_hidden_size or ffn_hidden_size,
        "moe_router_topk": own.moe_router_topk,
        "moe_router_score_function": own.moe_router_score_function,
        "moe_router_pre_softmax": own.moe_router_pre_softmax,
        "moe_router_num_groups": own.moe_router_num_groups or 1,
        "moe_router_group_topk": own.moe_router_group_topk or 1,
        "moe_router_group_best": own.moe_router_group_best,
        "moe_router_topk_scaling_factor": own.moe_router_topk_scaling_factor,
        "moe_router_in_fp32": own.moe_router_dtype == "fp32",
        "moe_router_in_fp64": own.moe_router_dtype == "fp64",
        "moe_shared_expert_intermediate_size": own.moe_shared_expert_intermediate_size or 0,
        "moe_shared_expert_gate": own.moe_shared_expert_gate,
    }


def upcycling_of(flags: Flags) -> int:
    """Return into how many experts upcycling divides an MLP; 0: checkpoints have experts."""
    own = flags[ExpertFlags]
    is_asked = own.moe_use_upcycling and experts_of(flags) is not None
    return own.moe_upcycling_granularity if is_asked else 0


def experts_of(flags: Flags) -> int | None:
    """Return the number of experts of a layer; ``None``: no experts, or one for all tokens."""
    experts = flags[ExpertFlags].num_experts
    return None if experts == 1 else experts


def is_about_experts(name: str) -> bool:
    """Return whether a field of the model is about its experts."""
    return name == "num_experts" or name.startswith("moe_")


def word_of_experts(name: str, model: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the flag that decides a field of the model about its experts, and the flag's value.

    Args:
        name: name of the field.
        model: all fields by name.

    Returns:
        The flag and its value; ``None``: the flag is not given.
    """
    option, value = _OPTIONS.get(name, option_of(name)), model[name]
    if not model.get("num_experts"):
        return option, None
    if name == "moe_layer_pattern":
        return option, _words_of_pattern(value)
    if name in ("moe_router_in_fp32", "moe_router_in_fp64"):
        return option, name.removeprefix("moe_router_in_") if value else None
    if name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        return option, value if isinstance(value, (tuple, list)) else (value,)
    if name in ("moe_router_num_groups", "moe_router_group_topk"):
        return option, value if model.get("moe_router_num_groups", 1) > 1 else None
    return option, value or None


def _words_of_pattern(pattern: Sequence[int]) -> str:
    """Return a pattern of layers with experts in the form of --moe-layer-freq."""
    if list(pattern) == [1] + [0] * (len(pattern) - 1):
        return str(len(pattern))
    return words_of_pattern(pattern)


def expert_pattern(flags: Flags) -> Pattern:
    """Return the pattern of the layers that have experts; errors as in ``parse_pattern``."""
    words, layers = flags[ExpertFlags].moe_layer_freq, flags[ModelFlags].num_layers
    pattern = parse_pattern("--moe-layer-freq", words, 1, layers)
    return pattern[::-1] if words.isdecimal() else pattern


def mixes_kinds(flags: Flags) -> bool:
    """Return whether some layers have experts and others have none."""
    if experts_of(flags) is None:
        return False
    try:
        return len(set(expert_pattern(flags))) > 1
    except ValueError:
        return False  # the rules about the flags report this mistake


def _layers(flags: Flags) -> Iterator[str]:
    if experts_of(flags) is None:
        return
    faults = list(faults_of(lambda: expert_pattern(flags)))
    yield from faults
    if not faults and not any(expert_pattern(flags)):
        words = flags[ExpertFlags].moe_layer_freq
        yield f"--moe-layer-freq {words} gives no layer experts: leave out --num-experts"


def _choices(flags: Flags) -> Iterator[str]:
    own, experts = flags[ExpertFlags], experts_of(flags)
    if experts is not None and own.moe_router_topk > experts:
        yield (
            f"--moe-router-topk {own.moe_router_topk} is more than --num-experts {experts}: a "
            "token cannot choose an expert twice; lower it"
        )


def _groups(flags: Flags) -> Iterator[str]:
    own, experts = flags[ExpertFlags], experts_of(flags)
    groups, chosen, topk = own.moe_router_num_groups, own.moe_router_group_topk, own.moe_router_topk
    if experts is None or groups is None or chosen is None:
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


def _upcycling(flags: Flags) -> Iterator[str]:
    own, experts, parts = flags[ExpertFlags], experts_of(flags), upcycling_of(flags)
    if not parts or experts is None:
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


def _one_expert(flags: Flags) -> Iterator[str]:
    if flags[ExpertFlags].num_experts != 1:
        return
    yield "--num-experts 1 changes nothing: every token passes the same layers"
    for option, value in options_of(ExpertFlags, flags[ExpertFlags]):
        if option != _EXPERTS and all_declarations((ExpertFlags,))[option].asks(value):
            yield f"{option} changes nothing at --num-experts 1"


EXPERT_RULES: Final[tuple[Rule, ...]] = (
    _layers,
    _choices,
    _groups,
    _upcycling,
)
"""The rules about the flags of experts; see ``megatron.config.topics``."""

EXPERT_NOTES: Final[tuple[Rule, ...]] = (_one_expert,)
"""The rules that find flags of experts that change nothing together with the others."""
