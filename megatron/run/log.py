"""Printed lines, traces and measurements: settings and rules."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from megatron.flags.declare import flag
from megatron.flags.groups import Flags
from megatron.flags.ranges import INTERVAL, NOT_NEGATIVE, Range
from megatron.flags.rules import refuses
from megatron.run.dry_run import DryRunSettings
from megatron.run.generate import GenerateSettings
from megatron.run.records import RecordSettings
from megatron.run.train import TrainSettings, iterations

SCHEDULE_PROFILE_ITERATIONS: Final = 3
"""Iterations whose passes are timed if ``--profile-schedule-end`` is not given."""


@dataclass(frozen=True)
class LogSettings:
    """Printed lines, traces and measurements.

    Attributes:
        records: records in addition to the printed lines.
        generate: text that the model writes.
    """

    # fmt: off
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
    # fmt: on

    records: RecordSettings = field(default_factory=RecordSettings)
    generate: GenerateSettings = field(default_factory=GenerateSettings)

    @property
    def timed_iterations(self) -> range:
        """Iterations whose passes are timed, counted from 1."""
        start, end = self.profile_schedule_start, self.profile_schedule_end
        if start is None:
            return range(0)
        return range(start, start + SCHEDULE_PROFILE_ITERATIONS if end is None else end)


@refuses
def _trace(flags: Flags) -> Iterator[str]:
    log = flags[LogSettings]
    if not log.profile:
        return
    if log.profile_step_end <= log.profile_step_start:
        yield (
            f"--profile-step-end {log.profile_step_end} is not after --profile-step-start "
            f"{log.profile_step_start}: nothing would be traced; raise it"
        )
    last = iterations(flags[TrainSettings]).last
    if log.profile_step_start > last > 0:
        yield (
            f"--profile-step-start {log.profile_step_start} is after the last iteration, "
            f"{last}: nothing would be traced; lower it"
        )


@refuses
def _traced_ranks(flags: Flags) -> Iterator[str]:
    """Refuse to trace only ranks that the job does not have."""
    log, ranks = flags[LogSettings], flags.world_size
    if (
        log.profile
        and log.profile_ranks
        and min(log.profile_ranks) >= ranks
        and not flags[DryRunSettings].dry_run
    ):
        yield (
            f"--profile-ranks {' '.join(map(str, log.profile_ranks))}: nothing would be traced, as "
            f"the ranks of this job (WORLD_SIZE) are 0 to {ranks - 1}: name some of them"
        )


@refuses
def _schedule_profile(flags: Flags) -> Iterator[str]:
    timed = flags[LogSettings].timed_iterations
    start, end = timed.start, timed.stop
    if flags[LogSettings].profile_schedule_start is None:
        return
    if end <= start:
        yield (
            f"--profile-schedule-end {end} is not after --profile-schedule-start {start}: nothing "
            "would be measured; raise it"
        )
    if flags[LogSettings].save_measured_costs is None and not flags[LogSettings].replan:
        yield (
            f"--profile-schedule-start {start} measures passes, and nothing is done with it: add "
            "--save-measured-costs FILE, --replan or both"
        )
    last = iterations(flags[TrainSettings]).last
    if 0 < last < end - (not flags[LogSettings].replan):
        more = ", and --replan needs one more after them" if flags[LogSettings].replan else ""
        yield (
            f"--profile-schedule-start {start} measures the iterations before {end} "
            f"(--profile-schedule-end){more}, but the last is {last}: lower them"
        )
