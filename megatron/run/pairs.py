"""Which passes form pairs: the rules of the flags."""

from collections.abc import Iterator
from dataclasses import replace

from megatron.flags.groups import Flags
from megatron.flags.rules import notes
from megatron.parallel.settings import TensorRankSettings
from megatron.run.expert_ranks import expert_ranks
from megatron.schedules.settings import PairSettings, SliceSettings


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
    return flags[PairSettings].tp_comm_overlap and _why_not(flags) is None


def _why_not(flags: Flags) -> str | None:
    """Return the reason why no pair hides collectives of tensor-parallel ranks, if there is one."""
    if flags[TensorRankSettings].size == 1:
        return "at --tensor-model-parallel-size 1: no ranks share a layer"
    if flags[SliceSettings].num_seq_splits != 1:
        return "beside --num-seq-splits: no schedule joins the passes of slices"
    return None


@notes
def _nothing_to_hide(flags: Flags) -> Iterator[str]:
    why_not = _why_not(flags)
    if flags[PairSettings].tp_comm_overlap and why_not is not None:
        yield f"--tp-comm-overlap changes nothing {why_not}"
