"""How a run ends, and how it is guarded against faults: settings and rules."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.flags.declare import flag
from megatron.flags.groups import Flags
from megatron.flags.ranges import INTERVAL_OR_NONE, SECONDS, Range
from megatron.flags.rules import notes, refuses
from megatron.run.train import TrainSettings, iterations


def _iteration(word: str) -> int:
    """Read the number of an iteration, counted from 1."""
    if not re.fullmatch(r"0*[1-9]\d{0,17}", word, re.ASCII):
        raise ValueError("must be an iteration by the number of the log, from 1 on")
    return int(word)


@dataclass(frozen=True)
class GuardSettings:
    """What a run of weeks does when something goes wrong, or its time is over."""

    # fmt: off
    exit_signal_handler: bool = flag(False,
        "On SIGTERM or SIGUSR1 to any rank, save at the end of the iteration and leave with exit "
        "code 0.")
    exit_signal: Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"] = flag("SIGTERM",
        "A further signal on which --exit-signal-handler saves and leaves.",
        idle_without="--exit-signal-handler")
    exit_duration_in_mins: float | None = flag(None,
        "Save and leave at the end of the first iteration after this many minutes.",
        Range(1e-6, 10**12),
        unset="never")
    kill_switch_path: Path | None = flag(None,
        "Save and leave at the end of the iteration in which this file appears.", unset="none")
    trigger_path: Path | None = flag(None,
        "Folder to look into after every iteration: a file 'save' there lets the run save, a file "
        "'exit' lets it save and leave. Both are removed.", unset="none")
    no_check_for_nan_in_loss_and_grad: bool = flag(False,
        "If the loss or the gradient norm is not finite, take no step and go on. Otherwise the "
        "run ends there, and names the rank and the samples.")
    check_for_spiky_loss: bool = flag(False,
        "Report every loss that is 10 times the largest loss of this launch before it, with its "
        "samples.")
    check_for_large_grads: bool = flag(False,
        "Report every gradient norm that is 10 times the largest norm before it, with its samples.")
    iterations_to_skip: tuple[int, ...] = flag((),
        "Iterations whose samples are passed over without a step, by the log's numbers.",
        reads=_iteration, unset="none", metavar="N ...")
    hang_seconds: float | None = flag(None,
        "Seconds without progress of a rank after which the job ends and names the ranks that are "
        "stuck.",
        Range(0.1, SECONDS.most), unset="half of --distributed-timeout-minutes")
    check_weight_hash_across_dp_replicas_interval: int | None = flag(None,
        "Iterations between two checks that ranks with the same weights hold the same bits; a rank "
        "that differs is named, and the run ends. It is checked before every save too. 0: never.",
        INTERVAL_OR_NONE, unset="so many that checks cost 0.1 % of the time")
    log_straggler: bool = flag(False,
        "For every printed line, tell which ranks computed for longer than usual in its iteration, "
        "without their waits for others. --log-jsonl records it in any case.")
    manual_gc: bool = flag(False,
        "Collect Python's garbage on all ranks at the same times, so that no rank waits for "
        "another rank's collector.")
    manual_gc_interval: int = flag(0,
        "With --manual-gc: iterations from one collection to the next; 0: collect only before and "
        "after evaluations and texts.",
        INTERVAL_OR_NONE, idle_without="--manual-gc")
    no_manual_gc_eval: bool = flag(False,
        "With --manual-gc: do not collect before and after evaluations and texts.",
        idle_without="--manual-gc")
    # fmt: on

    @property
    def exit_signals(self) -> tuple[str, ...]:
        """Names of the signals after which the run saves and ends."""
        names = {"SIGTERM", "SIGUSR1", self.exit_signal}
        return tuple(sorted(names)) if self.exit_signal_handler else ()

    def seconds_of_hang(self, timeout_minutes: float) -> float:
        """Return the seconds without progress after which a job ends.

        Args:
            timeout_minutes: minutes that a collective may wait.
        """
        return self.hang_seconds or 30 * timeout_minutes


@notes
def _skipped_beyond_the_end(flags: Flags) -> Iterator[str]:
    total = iterations(flags[TrainSettings]).total
    beyond = sorted({one for one in flags[GuardSettings].iterations_to_skip if one > total})
    if beyond and total > 0:
        yield (
            f"--iterations-to-skip {' '.join(map(str, beyond))} changes nothing: the last "
            f"iteration is {total}"
        )


@refuses
def _trigger_folder(flags: Flags) -> Iterator[str]:
    path = flags[GuardSettings].trigger_path
    try:
        is_no_folder = path is not None and path.exists() and not path.is_dir()
    except OSError as error:  # the name is too long, or a folder above has no permission for us
        yield f"--trigger-path {path}: {error.strerror}; give a folder that can be looked into"
        return
    if is_no_folder:
        yield (
            f"--trigger-path {path} is no folder: give one, in which a file 'save' or 'exit' is "
            "looked for, or a path at which a folder is made later"
        )
