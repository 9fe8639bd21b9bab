"""The flags of what a run records besides its printed lines."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megatron.config.declare import COUNT, flag

_CURVES: Final = "--tensorboard-dir or --wandb-project"

# The formatter is off so that the flags read as a table.
# fmt: off


@dataclass(frozen=True)
class RecordFlags:
    """Records for programs, and the live display."""

    log_jsonl: Path | None = flag(None,
        "File of JSON lines: one record for every printed line, and the configuration first. A "
        "run that goes on appends to it.", unset="none")
    tensorboard_dir: Path | None = flag(None,
        "Folder of curves for TensorBoard, with Megatron-LM's names.", unset="none")
    tensorboard_log_interval: int = flag(1,
        "Iterations between two points of the curves of loss, rate and norm; the others have one "
        "for every --log-interval.", COUNT, idle_without=_CURVES)
    tensorboard_queue_size: int = flag(1000, "Points that may wait to be written.", COUNT,
        idle_without="--tensorboard-dir")
    log_timers_to_tensorboard: bool = flag(False,
        "Curves of times, throughput and the ranks' idle share too.", idle_without=_CURVES)
    log_memory_to_tensorboard: bool = flag(False,
        "Curves of peak memory too, of the rank that holds the most.", idle_without=_CURVES)
    log_validation_ppl_to_tensorboard: bool = flag(False,
        "Curves of the perplexity of evaluations too.", idle_without=_CURVES)
    no_log_loss_scale_to_tensorboard: bool = flag(False,
        "No curve of the loss scale.", idle_without="--fp16")
    log_world_size_to_tensorboard: bool = flag(False,
        "A curve of the number of ranks too.", idle_without=_CURVES)
    wandb_project: str | None = flag(None,
        "Project of Weights & Biases to send the same curves to.", unset="none")
    wandb_exp_name: str | None = flag(None, "The run's name there.",
        unset="one that Weights & Biases makes up", idle_without="--wandb-project")
    wandb_entity: str | None = flag(None, "User or team that owns the project.",
        unset="the one that is logged in", idle_without="--wandb-project")
    wandb_save_dir: Path | None = flag(None, "Folder of its own files.",
        unset="wandb in --save, else wandb", idle_without="--wandb-project")
    log_progress: bool = flag(False,
        "Append a line to progress.txt in the folder of --save for every start and every save, "
        "with the throughput so far.", idle_without="--save")
    no_live_display: bool = flag(False,
        "Print lines only, even on a terminal, where a display of the run stands below them.")
