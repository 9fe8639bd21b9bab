"""Records of a run for programs: settings and rules."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from megatron.flags.declare import flag
from megatron.flags.groups import Flags
from megatron.flags.ranges import INTERVAL
from megatron.flags.rules import refuses_in

_CURVES: Final = "--tensorboard-dir or --wandb-project"
TENSORBOARD: Final = ("tensorboard", "tensorboardX")
"""Packages that write for TensorBoard. The first one that is installed is used."""


@dataclass(frozen=True)
class RecordSettings:
    """Records for programs, and the live display.

    Attributes:
        progress_folder: folder of the file with a line for every start and save; ``None``: there is
            no such file.
    """

    # fmt: off
    log_jsonl: Path | None = flag(None,
        "File of JSON lines: first the configuration, then a record for every printed line. A run "
        "that goes on appends to the file.", unset="none")
    tensorboard_dir: Path | None = flag(None,
        "Folder of curves for TensorBoard, with Megatron-LM's names.", unset="none")
    tensorboard_log_interval: int = flag(1,
        "Iterations between two points of the curves of loss, rate and norm. Other curves have a "
        "point for every --log-interval.", INTERVAL, idle_without=_CURVES)
    tensorboard_queue_size: int = flag(1000, "Points that may wait to be written.", INTERVAL,
        idle_without="--tensorboard-dir")
    log_timers_to_tensorboard: bool = flag(False,
        "Draw curves of times, throughput and the ranks' idle share too.", idle_without=_CURVES)
    log_memory_to_tensorboard: bool = flag(False,
        "Draw curves of peak memory too, of the rank that holds the most.", idle_without=_CURVES)
    log_validation_ppl_to_tensorboard: bool = flag(False,
        "Draw curves of the perplexity of evaluations too.", idle_without=_CURVES)
    no_log_loss_scale_to_tensorboard: bool = flag(False,
        "Draw no curve of the loss scale.", idle_without="--fp16")
    log_world_size_to_tensorboard: bool = flag(False,
        "Draw a curve of the number of ranks too.", idle_without=_CURVES)
    log_expert_loads: bool = flag(False,
        "Print a line for every layer with experts below every printed line: how many tokens have "
        "chosen each expert.", needs="--moe-per-layer-logging", lack="needs recorded loads")
    wandb_project: str | None = flag(None,
        "Project of Weights & Biases that gets the curves.", unset="none")
    wandb_exp_name: str | None = flag(None, "Name of the run in Weights & Biases.",
        unset="one that Weights & Biases makes up", idle_without="--wandb-project")
    wandb_entity: str | None = flag(None, "User or team that owns the project of Weights & Biases.",
        unset="the one that is logged in", idle_without="--wandb-project")
    wandb_save_dir: Path | None = flag(None, "Folder for the files of Weights & Biases.",
        unset="wandb in --save, else wandb", idle_without="--wandb-project")
    log_progress: bool = flag(False,
        "Append a line to progress.txt in the folder of --save for every start and every save, "
        "with the throughput so far.", idle_without="--save")
    no_live_display: bool = flag(False,
        "Print lines only, even on a terminal, where a display of the run stands below them.")
    # fmt: on

    progress_folder: Path | None = None

    def beside(self, save: Path | None, skip_train: bool) -> "RecordSettings":
        """Return the records of a run that saves its checkpoints in a folder, if it saves any.

        Weights & Biases writes next to the checkpoints, as in Megatron.
        """
        beside = None if save is None else save / "wandb"
        return replace(
            self,
            wandb_save_dir=self.wandb_save_dir or beside,
            progress_folder=save if self.log_progress and not skip_train else None,
        )


def is_installed(package: str) -> bool:
    """Return whether a package can be imported. A mere folder of the same name is no package."""
    found = find_spec(package)
    return found is not None and found.origin is not None


@refuses_in("real")
def _tensorboard(flags: Flags) -> Iterator[str]:
    """Refuse ``--tensorboard-dir`` without a package that writes for TensorBoard."""
    if flags[RecordSettings].tensorboard_dir is not None and not any(
        map(is_installed, TENSORBOARD)
    ):
        yield (
            f"--tensorboard-dir {flags[RecordSettings].tensorboard_dir}: neither "
            f"{' nor '.join(TENSORBOARD)} is installed: pip install tensorboard, or use --log-jsonl"
        )


@refuses_in("real")
def _wandb(flags: Flags) -> Iterator[str]:
    """Refuse ``--wandb-project`` without the client of Weights & Biases."""
    if flags[RecordSettings].wandb_project is not None and not is_installed("wandb"):
        yield (
            f"--wandb-project {flags[RecordSettings].wandb_project}: wandb is not installed: "
            "pip install wandb, or use --log-jsonl or --tensorboard-dir"
        )
