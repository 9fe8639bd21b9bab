"""Printed lines, traces, measurements and predictions: flags, rules and configurations."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from megatron.config.records import RecordConfig
from megatron.config.train import TrainFlags, iterations
from megatron.flags.declare import flag
from megatron.flags.groups import Flags, copied
from megatron.flags.ranges import BANDWIDTH, INTERVAL, LATENCY, NOT_NEGATIVE, RANKS, STRETCH, Range
from megatron.flags.rules import refuses
from megatron.simulator.costs.gpus import GPUS

DRY_RUN_GPU: Final = "A100"
SCHEDULE_PROFILE_ITERATIONS: Final = 3
"""Iterations whose passes are timed if ``--profile-schedule-end`` is not given."""


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class LogFlags:
    """Printed lines, traces and predictions."""

    log_interval: int = flag(100, "Iterations per printed line.", INTERVAL)
    peak_tflops: float | None = flag(None, "Peak of one rank in TFLOP/s, for the MFU.",
        Range(1e-6, 1e6),
        unset="by GPU name, else measured")
    log_num_zeros_in_grad: bool = flag(False,
        "Print how many elements of the gradient are zero. To count them, all ranks wait for each "
        "other.")
    log_params_norm: bool = flag(False,
        "Print the norm of all weights. To form it, all ranks wait for each other, and sharded "
        "steps are completed.")
    moe_per_layer_logging: bool = flag(False,
        "Record layer by layer too, in --log-jsonl and as curves: the routers' losses, the balance "
        "of experts, and how many tokens have chosen each expert.", idle_without="--num-experts")
    profile: bool = flag(False, "Write a torch profiler trace.")
    profile_step_start: int = flag(10, "First traced iteration.", INTERVAL,
        idle_without="--profile")
    profile_step_end: int = flag(12, "First iteration that is no longer traced.", INTERVAL,
        idle_without="--profile")
    profile_dir: Path = flag(Path("profile"), "Folder of the traces.",
        idle_without="--profile")
    profile_ranks: tuple[int, ...] = flag((), "Ranks of the job that are traced.", NOT_NEGATIVE,
        unset="all of them", metavar="RANK ...", idle_without="--profile")
    pytorch_profiler_collect_shapes: bool = flag(False,
        "Let traces hold the shapes of each operation's inputs.", idle_without="--profile")
    record_timeline: Path | None = flag(None,
        "File for the timeline of the last iteration as it ran, in the simulator's format.",
        unset="none")
    profile_schedule_start: int | None = flag(None, "First iteration whose passes are timed.",
        INTERVAL, unset="never")
    profile_schedule_end: int | None = flag(None,
        "First iteration whose passes are no longer timed.", INTERVAL,
        unset="three iterations later", idle_without="--profile-schedule-start")
    save_measured_costs: Path | None = flag(None,
        "Write the measured costs of passes to this file, for --measured-costs.",
        unset="not saved", needs="--profile-schedule-start", lack="needs measured passes")
    replan: bool = flag(False,
        "Make a new plan from the measured costs, measure this plan too, and keep the faster one.",
        needs="--profile-schedule-start", lack="needs measured passes", excludes="--schedule-file")
    record_memory_history: bool = flag(False,
        "Record which code allocates GPU memory, for the snapshot that a rank writes when it is "
        "out of memory.")
    memory_snapshot_path: Path = flag(Path("snapshot.pickle"),
        "File for the snapshot that a rank writes when it is out of memory. The rank's number is "
        "added to the name.")
    dry_run: bool = flag(False,
        "Predict the plan, its time and its memory, and start nothing. No ranks, devices or data "
        "are needed.")
    dry_run_gpu: str | None = flag(None, "The GPU to predict for.", unset=DRY_RUN_GPU,
        choices=tuple(GPUS), any_case=True, needs="--dry-run")
    dry_run_replicas: int | None = flag(None, "Replicas of the model to predict for.", RANKS,
        unset="1", needs="--dry-run")
    dry_run_replica_bandwidth: float | None = flag(None,
        "GB/s in one direction from a rank to its replica in another machine.", BANDWIDTH,
        unset="by the GPU", needs="--dry-run-replicas")
    dry_run_replica_latency: float | None = flag(None,
        "Microseconds that a step from a rank to its replica takes besides the time of its bytes.",
        LATENCY, unset="10", needs="--dry-run-replicas")
    dry_run_expert_imbalance: float = flag(1.0,
        "Tokens at the experts of a stage's busiest rank, divided by the mean of all ranks. Every "
        "microbatch and layer counts so.", STRETCH, needs="--dry-run",
        idle_without="--expert-model-parallel-size")
# fmt: on


@dataclass(frozen=True)
class LogConfig(LogFlags):
    """Printed lines and measurements of a run: the values of its flags, and other records.

    Attributes:
        records: records in addition to the printed lines.
    """

    records: RecordConfig = field(default_factory=RecordConfig)


@dataclass(frozen=True)
class DryRun:
    """A prediction instead of a training run.

    Attributes:
        gpu: name of the GPU to predict for.
        replica_bandwidth: bytes/s in one direction from a rank to its replica; ``None``: the
            bandwidth that machines with this GPU usually have.
        replica_latency: seconds of a step from a rank to its replica; ``None``: the usual time.
        expert_imbalance: tokens at the experts of the busiest rank, divided by the mean of ranks.
    """

    gpu: str
    replica_bandwidth: float | None = None
    replica_latency: float | None = None
    expert_imbalance: float = 1.0


def profiled_iterations(flags: LogFlags) -> tuple[int | None, int | None]:
    """Return the first iteration whose passes are timed, and the first that is timed no longer."""
    start, end = flags.profile_schedule_start, flags.profile_schedule_end
    if start is not None and end is None:
        end = start + SCHEDULE_PROFILE_ITERATIONS
    return start, end


def log_config(flags: LogFlags, records: RecordConfig) -> LogConfig:
    """Return the configuration of printed lines, traces, measurements and records."""
    return copied(
        LogConfig,
        flags,
        profile_schedule_end=profiled_iterations(flags)[1],
        records=records,
    )


def dry_run_config(flags: LogFlags) -> DryRun:
    """Return what to predict for: the GPU, the link between replicas, the balance of experts."""
    bandwidth, latency = flags.dry_run_replica_bandwidth, flags.dry_run_replica_latency
    return DryRun(
        flags.dry_run_gpu or DRY_RUN_GPU,
        None if bandwidth is None else 1e9 * bandwidth,
        None if latency is None else 1e-6 * latency,
        flags.dry_run_expert_imbalance,
    )


@refuses
def _trace(flags: Flags) -> Iterator[str]:
    log = flags[LogFlags]
    if not log.profile:
        return
    if log.profile_step_end <= log.profile_step_start:
        yield (
            f"--profile-step-end {log.profile_step_end} is not after --profile-step-start "
            f"{log.profile_step_start}: nothing would be traced; raise it"
        )
    last = iterations(flags[TrainFlags]).last
    if log.profile_step_start > last > 0:
        yield (
            f"--profile-step-start {log.profile_step_start} is after the last iteration, "
            f"{last}: nothing would be traced; lower it"
        )


@refuses
def _traced_ranks(flags: Flags) -> Iterator[str]:
    """Refuse to trace only ranks that the job does not have."""
    log, ranks = flags[LogFlags], flags.world_size
    if log.profile and log.profile_ranks and min(log.profile_ranks) >= ranks and not log.dry_run:
        yield (
            f"--profile-ranks {' '.join(map(str, log.profile_ranks))}: nothing would be traced, as "
            f"the ranks of this job (WORLD_SIZE) are 0 to {ranks - 1}: name some of them"
        )


@refuses
def _schedule_profile(flags: Flags) -> Iterator[str]:
    start, end = profiled_iterations(flags[LogFlags])
    if start is None or end is None:
        return
    if end <= start:
        yield (
            f"--profile-schedule-end {end} is not after --profile-schedule-start {start}: nothing "
            "would be measured; raise it"
        )
    if flags[LogFlags].save_measured_costs is None and not flags[LogFlags].replan:
        yield (
            f"--profile-schedule-start {start} measures passes, and nothing is done with it: add "
            "--save-measured-costs FILE, --replan or both"
        )
    last = iterations(flags[TrainFlags]).last
    if 0 < last < end - (not flags[LogFlags].replan):
        more = ", and --replan needs one more after them" if flags[LogFlags].replan else ""
        yield (
            f"--profile-schedule-start {start} measures the iterations before {end} "
            f"(--profile-schedule-end){more}, but the last is {last}: lower them"
        )
