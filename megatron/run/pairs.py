"""Which passes form pairs: the rules of the flags."""

from collections.abc import Iterator
from dataclasses import replace

from megatron.flags.groups import Flags
from megatron.flags.rules import notes
from megatron.parallel.settings import TensorRankSettings
from megatron.run.expert_ranks import expert_ranks
from megatron.schedules.settings import PairSettings


def pairs_of(flags: Flags) -> PairSettings:
    """Return which passes form pairs; without collectives that pairs can hide, none do."""
    own = flags[PairSettings]
    experts = expert_ranks(flags).expert_model_parallel_size > 1
    asked = PairSettings(
        overlap_moe_expert_parallel_comm=experts and own.overlap_moe_expert_parallel_comm,
        tp_comm_overlap=hides_collectives(flags),
    )
    return replace(asked, delay_wgrad_compute=asked.joins and own.delay_wgrad_compute)


def hides_collectives(flags: Flags) -> bool:
    """Return whether pairs hide collectives of tensor-parallel ranks."""
    return flags[PairSettings].tp_comm_overlap and _shares_layers(flags)


def _shares_layers(flags: Flags) -> bool:
    return flags[TensorRankSettings].size > 1


@notes
def _nothing_to_hide(flags: Flags) -> Iterator[str]:
    if flags[PairSettings].tp_comm_overlap and not _shares_layers(flags):
        yield (
            "--tp-comm-overlap changes nothing at --tensor-model-parallel-size 1: no ranks share a "
            "layer"
        )
