"""The settings of a plan of passes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from megatron.flags.auto import AUTO, number_or_auto
from megatron.flags.declare import derived, flag
from megatron.flags.ranges import BANDWIDTH, DEPTH, PATIENCE, Range
from megatron.schedules.catalogue import CHUNKED_SCHEDULES, PAIRED_SCHEDULES, TRAINABLE_SCHEDULES
from megatron.schedules.limits import PENDING_FLAG, Gib, LimitByMemory, Percent
from megatron.schedules.slice_lengths import TOKENS, SliceStrategy

DEFAULT_SCHEDULE: Final = "1f1b"

ALL_CHUNKS: Final = 1_000_000
"""More chunks than a rank can have."""

USUAL_PERCENT: Final = 85.0
"""Percent of the memory that a limit takes by default, as in the zero-bubble fork."""

_MEMORY: Final = Range(1e-3, 1e6)
_MICROBATCHES: Final = Range(1, 10**12)


def _limit_or_auto(word: str) -> float:
    """Read a number of microbatches, whole or not, or the word ``auto``.

    Raises:
        ValueError: the word is neither of them, or the number is out of range.
    """
    if word == str(AUTO):
        return AUTO
    try:
        number = float(word)
    except ValueError:
        raise ValueError("give auto, or a number of microbatches") from None
    if not _MICROBATCHES.contains(number):
        raise ValueError(f"give auto, or a number, {_MICROBATCHES.words}")
    return number


@dataclass(frozen=True)
class ScheduleSettings:
    """The schedule of the passes.

    The settings of a run have the schedule under its own name, and the number of chunks.
    """

    # fmt: off
    pipeline_schedule: str = derived(
        "Schedule of the passes; auto takes the fastest of all, or one nearly as fast that holds "
        "less.", choices=TRAINABLE_SCHEDULES,
        instead="for any other, save its plan with tools/simulate.py --save-plan FILE and train it "
        "with --schedule-file FILE", unset=DEFAULT_SCHEDULE)
    enable_zero_bubble: bool = flag(False,
        "With a limit (--zero-bubble-max-pending-backward, "
        "--zero-bubble-adaptive-memory-limit-percentile or --zero-bubble-memory-limit-gib): "
        "schedule zb-auto. Without: zb-1p, which holds as many microbatches as 1f1b.")
    zero_bubble_v_schedule: bool = flag(False,
        "Schedule zb-v, or the one that --zero-bubble-v-schedule-mem-setup names; with or without "
        "--enable-zero-bubble.")
    zero_bubble_v_schedule_mem_setup: Literal["half", "min", "zb"] | None = flag(None,
        "Schedule that --zero-bubble-v-schedule takes: half is v-half, min is v-min, zb is zb-v.",
        unset="zb", idle_without="--zero-bubble-v-schedule")
    num_virtual_stages_per_pipeline_rank: int | None = flag(None,
        "Model chunks of a rank. Without --pipeline-schedule the flag implies interleaved.", DEPTH,
        unset=f"the schedule's least; for {' or '.join(CHUNKED_SCHEDULES)}",
        excludes="--num-layers-per-virtual-pipeline-stage")
    num_layers_per_virtual_pipeline_stage: int | None = flag(None,
        "Layers of a chunk: another way to give the number of chunks of a rank.", DEPTH,
        unset="by --num-virtual-stages-per-pipeline-rank")
    # fmt: on

    @property
    def name(self) -> str:
        """Name of the schedule, one of ``TRAINABLE_SCHEDULES``, in a run."""
        return self.pipeline_schedule

    @property
    def chunks(self) -> int | None:
        """Model chunks of a rank in a run; ``None``: as few as the schedule needs."""
        return self.num_virtual_stages_per_pipeline_rank

    def named(self, name: str, chunks: int | None) -> "ScheduleSettings":
        """Return the settings of a run, without other names of the schedule."""
        return replace(
            self,
            pipeline_schedule=name,
            num_virtual_stages_per_pipeline_rank=chunks,
            num_layers_per_virtual_pipeline_stage=None,
            enable_zero_bubble=False,
            zero_bubble_v_schedule=False,
            zero_bubble_v_schedule_mem_setup=None,
        )


@dataclass(frozen=True)
class PlanSettings:
    """How a plan of passes is found."""

    # fmt: off
    schedule_file: Path | None = flag(None,
        "File of a plan to train, as tools/simulate.py --save-plan writes it.", unset="none")
    measured_costs: Path | None = flag(None,
        "File of the costs of passes to plan with, as --save-measured-costs writes it.",
        unset="by FLOPs")
    zero_bubble_max_pending_backward: float | None = flag(None,
        "The most microbatches in flight on a rank, at least 1. zb-auto uses all of them. zb-v, "
        "v-half and v-min may use them to idle less, and --overlap-moe-expert-parallel-comm to "
        "hide more. auto takes a schedule within this limit. A schedule that needs more is "
        "refused. auto as the value: as many as memory has room for, on each rank "
        "(--zero-bubble-adaptive-memory-limit-percentile or --zero-bubble-memory-limit-gib).",
        unset="no limit, or as the limit by memory says", reads=_limit_or_auto,
        metavar="MICROBATCHES|auto")
    zero_bubble_adaptive_memory_limit_percentile: float | None = flag(None,
        "Percent of a GPU's memory that the tensors of a rank may take, as the limit of zb-auto "
        "and of all else that --zero-bubble-max-pending-backward limits. Each rank may have as "
        "many microbatches in flight as its counted bytes have room for. On CPUs: of the rank's "
        "equal part of the machine's memory.", Range(1, 100), metavar="PERCENT",
        unset=f"no limit; {USUAL_PERCENT:g} with --zero-bubble-max-pending-backward auto",
        excludes="--zero-bubble-memory-limit-gib")
    zero_bubble_memory_limit_gib: float | None = flag(None,
        "The same limit in GiB: the most that the tensors of a rank may take, with parameters, "
        "gradients and optimizer state.", Range(0.001, 1e6), metavar="GIB",
        unset="no limit, or as the percentage says")
    search_seconds: float | None = flag(None,
        "Seconds to search for a plan. When they are over, all ranks take the best plan that rank "
        "0 has found. Without this flag a search ends by a count of its work, so every machine "
        "finds the same plan. On a known GPU auto then compares schedules with about as much work "
        "as a core does in 20 s, after up to 10 s for bounds if it compares slices or the like "
        "too, and plans schedules that could still be better in up to 20 s.",
        PATIENCE, unset="no limit")
    advice_seconds: float = flag(20.0,
        "How long a dry run looks for settings that fit, or plans the other schedules that auto "
        "compares: the work that a core does in about so many seconds, so every machine names the "
        "same settings. Then it names the settings or schedules that it did not try.",
        PATIENCE, idle_without="--dry-run")
    # fmt: on

    @property
    def memory_limit(self) -> float | None:
        """The most microbatches in flight on a rank; ``None``: no such limit."""
        given = self.zero_bubble_max_pending_backward
        return None if given == AUTO else given

    @property
    def limit_by_memory(self) -> LimitByMemory | None:
        """The limit of the bytes that a rank's tensors may take; ``None``: no such limit.

        A number of microbatches goes before a percentage, and so does a limit in GiB.
        """
        if self.zero_bubble_memory_limit_gib is not None:
            return Gib(self.zero_bubble_memory_limit_gib)
        if self.memory_limit is not None:
            return None
        usual = None if self.zero_bubble_max_pending_backward is None else USUAL_PERCENT
        given = self.zero_bubble_adaptive_memory_limit_percentile
        percent = usual if given is None else given
        return None if percent is None else Percent(percent)

    def with_limit(self, limit: LimitByMemory | None) -> "PlanSettings":
        """Return the settings with this limit by memory alone, and the word ``auto`` resolved."""
        return replace(
            self,
            zero_bubble_max_pending_backward=self.memory_limit,
            zero_bubble_adaptive_memory_limit_percentile=(
                limit.number if isinstance(limit, Percent) else None
            ),
            zero_bubble_memory_limit_gib=limit.number if isinstance(limit, Gib) else None,
        )

    @property
    def is_limited_by_memory(self) -> bool:
        """Whether the bytes of a rank have a limit."""
        return self.limit_by_memory is not None

    @property
    def is_limited(self) -> bool:
        """Whether the microbatches in flight have a limit, as a number or by memory."""
        return self.memory_limit is not None or self.is_limited_by_memory

    @property
    def limiting_flag(self) -> str:
        """The flag that limits the microbatches in flight."""
        limit = self.limit_by_memory
        return PENDING_FLAG if limit is None else limit.flag


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


@dataclass(frozen=True)
class OffloadSettings:
    """Activations that wait on the host.

    The flags have the names of the zero-bubble fork (PipeOffload, arXiv 2503.01328).
    """

    # fmt: off
    cpu_offload: bool = flag(False,
        "Copy the activations of chunks to the host after their forward, and back before their "
        "backward, as many as the link to the host has time for.")
    offload_chunk_num: int | None = flag(None,
        "Chunks of every rank whose activations are copied: those that wait longest. auto: none, "
        "half of them or all, whichever makes the run the fastest that fits the job's GPUs by "
        "prediction, or one nearly as fast that holds less.",
        reads=number_or_auto, metavar="N|auto", unset="all chunks", idle_without="--cpu-offload")
    host_bandwidth: float | None = flag(None,
        "GB/s in one direction between a GPU and its host, for plans and predictions.", BANDWIDTH,
        unset="by the GPU", idle_without="--cpu-offload or --optimizer-cpu-offload")
    host_memory: float | None = flag(None,
        "GiB of the memory of a machine, which must have room for all that the machine's ranks "
        "keep on their host.", _MEMORY, unset="as much as the machine has; in a dry run, not known",
        idle_without="--cpu-offload or --optimizer-cpu-offload")
    # fmt: on

    @property
    def compares(self) -> bool:
        """Whether the plan chooses the number of chunks."""
        return self.cpu_offload and self.offload_chunk_num == AUTO

    @property
    def chunks(self) -> int:
        """Chunks of a rank whose activations wait on the host; perhaps more than the rank has."""
        return (self.offload_chunk_num or ALL_CHUNKS) if self.cpu_offload else 0

    @property
    def bandwidth(self) -> float | None:
        """Bytes/s in one direction between a GPU and its host, if a flag gives them."""
        return None if self.host_bandwidth is None else 1e9 * self.host_bandwidth

    @property
    def memory(self) -> float | None:
        """Bytes of a machine's memory, if a flag gives them."""
        return None if self.host_memory is None else 2**30 * self.host_memory
