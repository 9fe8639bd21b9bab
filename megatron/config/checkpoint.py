"""Checkpoints: flags, rules, configuration."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.config import CheckpointConfig
from megatron.config.train import TrainFlags
from megatron.flags.declare import COUNT, INTERVAL, flag
from megatron.flags.groups import Flags, copied
from megatron.flags.rules import notes


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class CheckpointFlags:
    """Checkpoints; any layout loads those of any other."""

    save: Path | None = flag(None,
        "Folder for checkpoints, at the end and every --save-interval iterations. One job at a "
        "time may save to it.",
        unset="nothing is saved")
    save_interval: int | None = flag(None, "Iterations between two checkpoints.", INTERVAL,
        unset="only at the end", idle_without="--save")
    save_retain_interval: int | None = flag(None,
        "Delete each checkpoint when the next one is saved, except where this number divides its "
        "iteration.", INTERVAL, unset="all are kept", idle_without="--save")
    async_save: bool = flag(False, "Go on with training while a checkpoint is written.",
        idle_without="--save")
    no_save_optim: bool = flag(False, "Save the weights only.", idle_without="--save")
    load: Path | None = flag(None,
        "Folder of checkpoints. The last good checkpoint in it is loaded.",
        unset="train from random weights")
    use_checkpoint_args: bool = flag(False,
        "Take the flags of the model from the checkpoint, where they are not given.",
        idle_without="--load")
    ckpt_step: int | None = flag(None, "Iteration of the checkpoint to load.", COUNT,
        unset="the last good one", idle_without="--load")
    no_load_optim: bool = flag(False,
        "Load the weights only, and go on from the checkpoint's iteration.",
        idle_without="--load")
    finetune: bool = flag(False, "Load the weights only, and begin at iteration 0.",
        idle_without="--load")
    exit_on_missing_checkpoint: bool = flag(False, "End the run if --load has no checkpoint.",
        idle_without="--load")
# fmt: on


def checkpoint_config(flags: CheckpointFlags, skip_train: bool, upcycling: int) -> CheckpointConfig:
    """Return what is saved and loaded.

    A run without training saves nothing and loads only weights, and a checkpoint must be there.

    Args:
        flags: of checkpoints.
        skip_train: whether the run does not train.
        upcycling: see ``CheckpointConfig``.
    """
    return copied(
        CheckpointConfig,
        flags,
        save=None if skip_train else flags.save,
        save_optimizer=not flags.no_save_optim,
        asynchronous=flags.async_save,
        load_step=flags.ckpt_step,
        load_optimizer=not flags.no_load_optim and not skip_train,
        must_load=flags.exit_on_missing_checkpoint or skip_train,
        trains=not skip_train,
        upcycling=upcycling,
    )


@notes
def _idle_without_training(flags: Flags) -> Iterator[str]:
    if flags[TrainFlags].skip_train and flags[CheckpointFlags].save is not None:
        yield (
            f"--save {flags[CheckpointFlags].save} changes nothing: --skip-train trains "
            "nothing to save"
        )
