"""Which ranks have which experts: rules of the flags, and the configuration that they become."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from megatron.config.experts import ExpertFlags, experts_of
from megatron.config.layers import sound_model
from megatron.config.parallelism import ParallelFlags, number_of_replicas
from megatron.flags.groups import Flags
from megatron.parallel.experts import Dispatcher
from megatron.schedules.counted import counted


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks of a stage that have the experts of a layer.

    Attributes:
        size: ranks e over which experts are spread.
        tensor_size: ranks etp that share an expert; ``None``: the tensor-parallel ranks.
        dispatcher: how tokens come to experts on other ranks.
        overlap: whether forwards are joined with backwards, to hide the travel of tokens.
        delays_weights: whether the weight gradients of these backwards are passes of their own.
    """

    size: int = 1
    tensor_size: int | None = None
    dispatcher: Dispatcher = "allgather"
    overlap: bool = False
    delays_weights: bool = False

    @property
    def visits(self) -> bool:
        """Whether tokens travel by the package DeepEP."""
        return self.dispatcher == "flex" and self.size > 1


def expert_ranks(flags: Flags) -> ExpertRanks:
    """Return the ranks of experts; for a model without experts, the defaults."""
    own = flags[ExpertFlags]
    if experts_of(flags) is None:
        return ExpertRanks()
    overlap = own.overlap_moe_expert_parallel_comm and own.expert_model_parallel_size > 1
    return ExpertRanks(
        own.expert_model_parallel_size,
        own.expert_tensor_parallel_size,
        own.moe_token_dispatcher_type,
        overlap,
        overlap and own.delay_wgrad_compute,
    )


def sizes_of_experts(flags: Flags) -> tuple[int, int]:
    """Return e and etp: ranks over which experts are spread, and ranks that share one."""
    own, tensor = flags[ExpertFlags], flags[ParallelFlags].tensor_model_parallel_size
    return own.expert_model_parallel_size, own.expert_tensor_parallel_size or tensor


def replicas_exchange(flags: Flags) -> bool:
    """Return whether tokens travel between replicas, to experts."""
    (size, tensor), sizes = sizes_of_experts(flags), flags[ParallelFlags]
    alike = sizes.tensor_model_parallel_size * sizes.context_parallel_size
    return experts_of(flags) is not None and size * tensor > alike


def _spread(flags: Flags) -> Iterator[str]:
    experts, (size, tensor), sizes = (
        experts_of(flags),
        sizes_of_experts(flags),
        flags[ParallelFlags],
    )
    if experts is None:
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


def _width(flags: Flags) -> Iterator[str]:
    own, (_, ranks) = flags[ExpertFlags], sizes_of_experts(flags)
    if experts_of(flags) is None:
        return
    try:
        width = sound_model(flags).moe_ffn_hidden_size
    except ValueError:  # another rule reports this mistake
        return
    if width % ranks:
        given = own.expert_tensor_parallel_size is not None
        flag = "--expert-tensor-parallel-size" if given else "--tensor-model-parallel-size"
        yield (
            f"{flag} {ranks} does not divide --moe-ffn-hidden-size {width}: they share it evenly, "
            f"so choose a multiple of {ranks}, or fewer ranks"
        )


def _nobody_to_ask(flags: Flags) -> Iterator[str]:
    asked, (size, _) = flags[ExpertFlags].moe_token_dispatcher_type, sizes_of_experts(flags)
    if experts_of(flags) is not None and size == 1 and asked != "allgather":
        yield (
            f"--moe-token-dispatcher-type {asked} changes nothing at --expert-model-parallel-size "
            "1: no expert is on another rank"
        )


def _nothing_to_hide(flags: Flags) -> Iterator[str]:
    own, (size, _) = flags[ExpertFlags], sizes_of_experts(flags)
    if experts_of(flags) is not None and size == 1 and own.overlap_moe_expert_parallel_comm:
        yield (
            "--overlap-moe-expert-parallel-comm changes nothing at --expert-model-parallel-size 1: "
            "no token travels to another rank"
        )


EXPERT_RANK_RULES: Final = (_spread, _width)
EXPERT_RANK_NOTES: Final = (_nobody_to_ask, _nothing_to_hide)
