"""The settings of a plan of passes."""

from dataclasses import dataclass

from megatron.flags.declare import flag
from megatron.schedules.catalogue import PAIRED_SCHEDULES


@dataclass(frozen=True)
class PairSettings:
    """Pairs of a forward and a backward that run in turns."""

    # fmt: off
    overlap_moe_expert_parallel_comm: bool = flag(False,
        "Join each forward with a backward that stands near it in the plan, where no iteration "
        "becomes longer: each works while tokens of the other travel to experts and back. A rank "
        "may then hold one microbatch more, or as many as --zero-bubble-max-pending-backward "
        f"allows. --pipeline-schedule {' or '.join(PAIRED_SCHEDULES)} is made for it.",
        idle_without="--num-experts")
    delay_wgrad_compute: bool = flag(False,
        "Make weight gradients passes of their own (W), after the pair of their backward, in "
        "schedules that do not split the backward either.",
        idle_without="--overlap-moe-expert-parallel-comm")
    # fmt: on
