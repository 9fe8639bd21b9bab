"""Rules about checkpoints, the end of a run, and its way on after a fault."""

import os
from collections.abc import Iterator

from megatron.checkpoint.settings import CheckpointSettings
from megatron.flags.declare import option_of
from megatron.flags.groups import Flags
from megatron.flags.rules import notes
from megatron.run.dry_run import DryRunSettings
from megatron.run.generate import GenerateSettings
from megatron.run.guard import GuardSettings
from megatron.run.train import TrainSettings, evaluation_batches, iterations


@notes
def _intervals_beyond_the_end(flags: Flags) -> Iterator[str]:
    total = iterations(flags[TrainSettings]).total
    intervals: dict[str, int | None] = {
        name: getattr(flags[TrainSettings], name) for name in ("eval_interval", "exit_interval")
    }
    intervals["generate_interval"] = flags[GenerateSettings].generate_interval
    checks = "check_weight_hash_across_dp_replicas_interval"
    if flags[CheckpointSettings].save is None:  # the end of a run is checked before its save
        intervals[checks] = flags[GuardSettings].check_weight_hash_across_dp_replicas_interval
    for name, interval in intervals.items():
        if interval is not None and interval > total > 0:
            ends = name == "eval_interval" and evaluation_batches(flags[TrainSettings])
            instead = "leaves the evaluation at the end" if ends else "changes nothing"
            yield f"{option_of(name)} {interval} {instead}: the last iteration is {total}"


@notes
def _nothing_saved_at_the_exit(flags: Flags) -> Iterator[str]:
    guard = flags[GuardSettings]
    if flags[CheckpointSettings].save is not None:
        return
    if guard.exit_signal_handler:
        yield "--exit-signal-handler ends the run, and saves nothing without --save"
    if guard.exit_duration_in_mins is not None:
        yield (
            f"--exit-duration-in-mins {guard.exit_duration_in_mins:g} ends the run, and saves "
            "nothing without --save"
        )
    if guard.kill_switch_path is not None:
        path = guard.kill_switch_path
        yield f"--kill-switch-path {path} ends the run, and saves nothing without --save"
    if guard.trigger_path is not None:
        yield f"--trigger-path {guard.trigger_path}: a file 'save' changes nothing without --save"


@notes
def _restart_from_nothing(flags: Flags) -> Iterator[str]:
    """Note that a restarted job goes on only if it loads the checkpoint of the job before."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    save, load = flags[CheckpointSettings].save, flags[CheckpointSettings].load
    if restarts == "0" or flags[DryRunSettings].dry_run:
        return
    if save is None or load is None or save.absolute() != load.absolute():
        yield (
            f"--max-restarts {restarts} of torchrun starts the job anew after a fault: to go on "
            "from the last checkpoint, give --save and --load the same folder, and --save-interval"
        )
    elif flags[CheckpointSettings].save_interval is None:
        yield (
            f"--max-restarts {restarts} of torchrun starts the job anew after a fault: without "
            "--save-interval there is no checkpoint to go on from"
        )


@notes
def _idle_without_training(flags: Flags) -> Iterator[str]:
    if flags[TrainSettings].skip_train and flags[CheckpointSettings].save is not None:
        yield (
            f"--save {flags[CheckpointSettings].save} changes nothing: --skip-train trains "
            "nothing to save"
        )
