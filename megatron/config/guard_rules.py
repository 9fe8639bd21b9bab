"""The rules about how a run ends, and about what guards it."""

import os
from collections.abc import Iterator
from typing import Final

from megatron.config.declare import Flags, option_of
from megatron.config.flags import LogFlags, TrainFlags
from megatron.config.guard_flags import parse_iterations
from megatron.config.lengths import iterations
from megatron.config.long_run_flags import CheckpointFlags, GuardFlags


def _iterations_to_skip(flags: Flags) -> Iterator[str]:
    try:
        parse_iterations(flags[GuardFlags].iterations_to_skip)
    except ValueError as error:
        yield str(error)


def _intervals_beyond_the_end(flags: Flags) -> Iterator[str]:
    total = iterations(flags[TrainFlags]).total
    for name in ("eval_interval", "exit_interval"):
        interval = getattr(flags[TrainFlags], name)
        if interval is not None and interval > total > 0:
            yield f"{option_of(name)} {interval} changes nothing: the last iteration is {total}"


def _skipped_beyond_the_end(flags: Flags) -> Iterator[str]:
    total = iterations(flags[TrainFlags]).total
    beyond = [
        i for i in sorted(parse_iterations(flags[GuardFlags].iterations_to_skip)) if i > total
    ]
    if beyond and total > 0:
        yield (
            f"--iterations-to-skip {' '.join(map(str, beyond))} changes nothing: the last "
            f"iteration is {total}"
        )


def _nothing_saved_at_the_exit(flags: Flags) -> Iterator[str]:
    guard = flags[GuardFlags]
    if flags[CheckpointFlags].save is not None:
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


def _restart_from_nothing(flags: Flags) -> Iterator[str]:
    """A restarted job goes on only where it finds what the one before has saved."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    save, load = flags[CheckpointFlags].save, flags[CheckpointFlags].load
    if restarts == "0" or flags[LogFlags].dry_run:
        return
    if save is None or load is None or save.absolute() != load.absolute():
        yield (
            f"--max-restarts {restarts} of torchrun starts the job anew after a fault: to go on "
            "from the last checkpoint, give --save and --load the same folder, and --save-interval"
        )
    elif flags[CheckpointFlags].save_interval is None:
        yield (
            f"--max-restarts {restarts} of torchrun starts the job anew after a fault: without "
            "--save-interval there is no checkpoint to go on from"
        )


GUARD_RULES: Final = (_iterations_to_skip,)
"""The rules about mistakes."""

GUARD_NOTES: Final = (
    _intervals_beyond_the_end,
    _skipped_beyond_the_end,
    _nothing_saved_at_the_exit,
    _restart_from_nothing,
)
"""The rules about flags that change nothing, or less than they promise."""
