"""The settings of a plan of passes."""

from dataclasses import dataclass

from megatron.flags.auto import number_or_auto
from megatron.flags.declare import flag
from megatron.schedules.catalogue import PAIRED_SCHEDULES
from megatron.schedules.slice_lengths import TOKENS, SliceStrategy


@dataclass(frozen=True)
class PairSettings:
    """Pairs of passes that run in turns."""

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
        idle_without="--overlap-moe-expert-parallel-comm or --tp-comm-overlap")
    tp_comm_overlap: bool = flag(False,
        "Join two passes that stand near each other in the plan, where no iteration becomes "
        "longer: a forward with a backward, or either of them with weight gradients (W) or with a "
        "pass of the vocabulary layers. Each works while the other one waits for collectives of "
        "tensor-parallel ranks, or of context-parallel ranks that make no ring. A rank may then "
        "hold one microbatch more, or as many as --zero-bubble-max-pending-backward allows.")
    # fmt: on

    @property
    def joins(self) -> bool:
        """Whether the plan may have pairs."""
        return self.overlap_moe_expert_parallel_comm or self.tp_comm_overlap

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes at whose collectives the passes of a pair switch.

        A ring is not among them: its messages travel while the pass that sends them works.
        """
        experts = ("experts", "expert_tensor") if self.overlap_moe_expert_parallel_comm else ()
        return (*experts, *(("tensor", "context", "context_heads") if self.tp_comm_overlap else ()))


@dataclass(frozen=True)
class SliceSettings:
    """Slices of microbatches."""

    # fmt: off
    num_seq_splits: int = flag(1,
        "Slices into which every microbatch is cut along its sequence. Each has passes of its own, "
        "so that the pipeline fills sooner and holds less. auto: 1, 2, 4 or 8, whichever makes the "
        "run the fastest that fits the job's GPUs by prediction, or one nearly as fast that holds "
        "less, with slices of equally many FLOPs where they can be had and no strategy is named.",
        reads=number_or_auto, metavar="N|auto")
    seq_split_strategy: SliceStrategy | None = flag(None,
        "uniform: slices have equally many tokens. balanced: their layers have equally many FLOPs. "
        "Attention of later tokens sees more, so later slices are shorter, by multiples of "
        f"{TOKENS} tokens.", unset="uniform; with --num-seq-splits auto balanced where possible",
        idle_without="--num-seq-splits > 1 or --num-seq-splits auto")
    # fmt: on

    @property
    def strategy(self) -> SliceStrategy:
        """How samples are cut, in a run whose number of slices is decided."""
        return self.seq_split_strategy or "uniform"
