"""Rules about experts: their number, their ranks, their first weights, and their products."""

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from megatron.flags.conditions import alternatives
from megatron.flags.declare import Declaration
from megatron.flags.groups import Flags, all_declarations, options_of
from megatron.flags.rules import notes, refuses, refuses_in
from megatron.kernels.cuda.grouped_packages import TYPES, load_grouped_package
from megatron.kernels.settings import GroupedProductSettings
from megatron.layers.eight_bit_settings import FORMAT
from megatron.layers.experts.settings import SHARED_EXPERT, ExpertSettings
from megatron.parallel.context_settings import ContextRankSettings
from megatron.parallel.settings import ExpertRankSettings, TensorRankSettings
from megatron.run.expert_ranks import sizes_of_experts
from megatron.run.experts import is_mixture, upcycling_of
from megatron.run.grouped_products import GROUPED, grouped_package, in_eight_bits
from megatron.run.model import sound_model
from megatron.run.parallelism import number_of_replicas, on_cuda
from megatron.run.precision import PrecisionSettings
from megatron.schedules.counted import counted
from megatron.schedules.settings import PairSettings

_EXPERTS: Final = "--num-experts"


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
def _spread(flags: Flags) -> Iterator[str]:
    experts, (size, tensor) = flags[ExpertSettings].num_experts, sizes_of_experts(flags)
    if not is_mixture(flags):
        return
    if experts % size:
        yield (
            f"--expert-model-parallel-size {size} does not divide --num-experts {experts}: every "
            f"rank has as many; choose a divisor of {experts}"
        )
    alike = flags[TensorRankSettings].size * flags[ContextRankSettings].size
    ranks = alike * number_of_replicas(flags)
    if ranks % (size * tensor):
        yield (
            f"--expert-model-parallel-size {size} with --expert-tensor-parallel-size {tensor}: the "
            f"{counted(ranks, 'rank')} of a stage, tensor-, context- and data-parallel ones, do "
            f"not divide into groups of {size * tensor}; lower one of the two, or start more ranks"
        )


@refuses
def _width(flags: Flags) -> Iterator[str]:
    own, (_, ranks) = flags[ExpertRankSettings], sizes_of_experts(flags)
    if not is_mixture(flags):
        return
    width = sound_model(flags).experts.moe_ffn_hidden_size
    if width % ranks:
        given = own.expert_tensor_parallel_size is not None
        flag = "--expert-tensor-parallel-size" if given else "--tensor-model-parallel-size"
        yield (
            f"{flag} {ranks} does not divide --moe-ffn-hidden-size {width}: they share it evenly, "
            f"so choose a multiple of {ranks}, or fewer ranks"
        )


@notes
def _nobody_to_ask(flags: Flags) -> Iterator[str]:
    asked, (size, _) = flags[ExpertRankSettings].moe_token_dispatcher_type, sizes_of_experts(flags)
    if is_mixture(flags) and size == 1 and asked != "allgather":
        yield (
            f"--moe-token-dispatcher-type {asked} changes nothing at --expert-model-parallel-size "
            "1: no expert is on another rank"
        )


@notes
def _nothing_to_hide(flags: Flags) -> Iterator[str]:
    asked = flags[PairSettings].overlap_moe_expert_parallel_comm
    if is_mixture(flags) and sizes_of_experts(flags)[0] == 1 and asked:
        yield (
            "--overlap-moe-expert-parallel-comm changes nothing at --expert-model-parallel-size 1: "
            "no token travels to another rank"
        )


_BRINGS: Final = {
    "transformer_engine": "pip install --no-build-isolation transformer_engine[pytorch]",
    "grouped_gemm": "pip install --no-build-isolation grouped_gemm",
}
"""For each package a command that may install it."""


@refuses
def _type_of_products(flags: Flags) -> Iterator[str]:
    package = grouped_package(flags)
    if package is not None and flags[PrecisionSettings].dtype not in TYPES[package]:
        can = {torch.bfloat16: "--bf16", torch.float16: "--fp16"}
        asked = " or ".join(can[dtype] for dtype in TYPES[package])
        yield (
            f"{GROUPED} {package}: that package does not multiply this type, or rounds it to TF32: "
            f"add {asked}, or leave it out"
        )


@refuses_in("real")
def _products_of_device(flags: Flags) -> Iterator[str]:
    package = grouped_package(flags)
    if package is None:
        return
    if not on_cuda(flags):
        yield f"{GROUPED} {package}: that package multiplies on GPUs only: leave it out"
        return
    try:
        load_grouped_package(package)
    except ValueError as error:
        yield (
            f"{GROUPED} {package}: {error}; {_BRINGS[package]} may bring it, or leave it out, and "
            "this project's kernels multiply"
        )


@notes
def _beside_eight_bits(flags: Flags) -> Iterator[str]:
    own = flags[GroupedProductSettings].moe_grouped_products
    if own != "local" and is_mixture(flags) and in_eight_bits(flags):
        yield f"{GROUPED} {own} changes nothing beside {FORMAT}: kernels multiply all experts then"
