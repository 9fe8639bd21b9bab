"""Where checkpoints are written and read, and which of their contents are used."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading of checkpoints; by default nothing is saved or loaded.

    Attributes:
        save: folder to write checkpoints to.
        save_interval: iterations between two checkpoints; ``None``: only at the end.
        save_retain_interval: older checkpoints are deleted unless their iteration is a multiple of
            this number; ``None`` keeps all.
        save_optimizer: write the optimizer's state too.
        asynchronous: go on with training while a copy of the state is written.
        load: folder to read a checkpoint from.
        load_step: iteration of the checkpoint to read; ``None``: the last undamaged checkpoint.
        load_optimizer: read the optimizer's state too.
        finetune: read only the weights, and start from iteration 0.
        must_load: end the run if there is no checkpoint to read.
        trains: whether the run trains on; otherwise changed rates mean nothing to it.
        upcycling: parts of the MLP of a dense checkpoint that experts are made of, one of each
            (``Upcycling``); 0: checkpoints are of the model itself.
    """

    save: Path | None = None
    save_interval: int | None = None
    save_retain_interval: int | None = None
    save_optimizer: bool = True
    asynchronous: bool = False
    load: Path | None = None
    load_step: int | None = None
    load_optimizer: bool = True
    finetune: bool = False
    must_load: bool = False
    trains: bool = True
    upcycling: int = 0
