"""Which ranks have which experts: the rules of the flags."""

from collections.abc import Iterator

from megatron.config.experts import is_mixture
from megatron.config.model import sound_model
from megatron.config.parallelism import ParallelFlags, number_of_replicas
from megatron.flags.groups import Flags
from megatron.flags.rules import notes, refuses
from megatron.layers.experts.settings import ExpertSettings
from megatron.parallel.settings import ExpertRankSettings
from megatron.schedules.counted import counted
from megatron.schedules.settings import PairSettings


def expert_ranks(flags: Flags) -> ExpertRankSettings:
    """Return the ranks of experts; for a model without experts, the defaults."""
    return flags[ExpertRankSettings] if is_mixture(flags) else ExpertRankSettings()


def sizes_of_experts(flags: Flags) -> tuple[int, int]:
    """Return e and etp: ranks over which experts are spread, and ranks that share one."""
    own, tensor = flags[ExpertRankSettings], flags[ParallelFlags].tensor_model_parallel_size
    return own.expert_model_parallel_size, own.expert_tensor_parallel_size or tensor


def replicas_exchange(flags: Flags) -> bool:
    """Return whether tokens travel between replicas, to experts."""
    (size, tensor), sizes = sizes_of_experts(flags), flags[ParallelFlags]
    alike = sizes.tensor_model_parallel_size * sizes.context_parallel_size
    return is_mixture(flags) and size * tensor > alike


@refuses
def _spread(flags: Flags) -> Iterator[str]:
    experts, sizes = flags[ExpertSettings].num_experts, flags[ParallelFlags]
    size, tensor = sizes_of_experts(flags)
    if not is_mixture(flags):
        return
    if experts % size:
        yield (
            f"--expert-model-parallel-size {size} does not divide --num-experts {experts}: every "
            f"rank has as many; choose a divisor of {experts}"
        )
    alike = sizes.tensor_model_parallel_size * sizes.context_parallel_size
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
    try:
        width = sound_model(flags).experts.moe_ffn_hidden_size
    except ValueError:  # another rule reports this mistake
        return
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
