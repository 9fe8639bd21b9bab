"""Where checkpoints are written and read, and which of their contents are used."""

from dataclasses import dataclass
from pathlib import Path

from megatron.flags.declare import flag, spelled, spells
from megatron.flags.ranges import COUNT, INTERVAL


@dataclass(frozen=True)
class UpcyclingSettings:
    """Experts that begin as copies of a dense model's MLP."""

    # fmt: off
    moe_use_upcycling: bool = flag(False,
        "--load has a dense model: each expert begins as a copy of its layer's MLP, and routers "
        "begin from --seed. The run begins at iteration 0 with weights alone, as with --finetune.",
        idle_without="--num-experts", needs="--load")
    moe_upcycling_granularity: int = flag(1,
        "With --moe-use-upcycling: parts into which an MLP is cut; an expert begins as one part.",
        COUNT,
        idle_without="--moe-use-upcycling")
    # fmt: on


@dataclass(frozen=True)
class CheckpointSettings:
    """Checkpoints; any layout loads those of any other.

    Attributes:
        trains: whether the run trains on; otherwise changed rates mean nothing to it.
        upcycling: parts of the MLP of a dense checkpoint that experts are made of, one of each
            (``Upcycling``); 0: checkpoints are of the model itself.
    """

    # fmt: off
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
    save_optimizer: bool = spelled(True,
        spells("--no-save-optim", False, "Save the weights only.", idle_without="--save"))
    load: Path | None = flag(None,
        "Folder of checkpoints. The last good checkpoint in it is loaded.",
        unset="train from random weights")
    use_checkpoint_args: bool = flag(False,
        "Take the flags of the model from the checkpoint, where they are not given.",
        idle_without="--load")
    ckpt_step: int | None = flag(None, "Iteration of the checkpoint to load.", COUNT,
        unset="the last good one", idle_without="--load")
    load_optimizer: bool = spelled(True, spells("--no-load-optim", False,
        "Load the weights only, and go on from the checkpoint's iteration.",
        idle_without="--load"))
    finetune: bool = flag(False, "Load the weights only, and begin at iteration 0.",
        idle_without="--load")
    exit_on_missing_checkpoint: bool = flag(False, "End the run if --load has no checkpoint.",
        idle_without="--load")
    # fmt: on

    trains: bool = True
    upcycling: int = 0
