"""The settings of a run's checkpoints, as other flags complete them."""

from dataclasses import replace

from megatron.checkpoint.settings import CheckpointSettings
from megatron.flags.groups import Flags
from megatron.run.train import TrainSettings


def checkpoints_of(flags: Flags, upcycling: int) -> CheckpointSettings:
    """Return the settings of a run's checkpoints; ``upcycling``: see ``CheckpointSettings``.

    A run without training saves nothing and loads only weights, and a checkpoint must be there.
    """
    own = replace(flags[CheckpointSettings], upcycling=upcycling)
    if not flags[TrainSettings].skip_train:
        return own
    return replace(
        own, save=None, load_optimizer=False, exit_on_missing_checkpoint=True, trains=False
    )
