"""Opens the log of a run: where rank 0 prints, and what records it writes."""

import sys
from typing import TextIO

from megatron.config.run_config import RecordConfig
from megatron.training.metrics.curves import Curves
from megatron.training.metrics.json_lines import JsonLines
from megatron.training.metrics.live_display import LiveDisplay, Terminal
from megatron.training.metrics.log import Lines, Log, Sink
from megatron.training.metrics.progress_file import ProgressFile
from megatron.training.metrics.tensorboard import TensorBoard
from megatron.training.metrics.weights_and_biases import WeightsAndBiases


def open_log(config: RecordConfig, rank: int, world_size: int, stream: TextIO | None = None) -> Log:
    """Return the log of ``rank``; nothing is written before the first record.

    Args:
        config: what is recorded.
        rank: of the job; only rank 0's log tells anything.
        world_size: ranks of the job.
        stream: to print to, by default standard output.
    """
    if rank > 0:
        return Log(_silent)
    stream = stream or sys.stdout
    sinks: list[Sink] = []
    say = _print
    if config.live_display and (terminal := Terminal(stream)).can_show:
        display = LiveDisplay(terminal)
        sinks.append(display)
        say = display.say
    sinks.append(Lines(say))
    curves = Curves(config, world_size)
    if config.log_jsonl is not None:
        sinks.append(JsonLines(config.log_jsonl))
    if config.progress_folder is not None:
        sinks.append(ProgressFile(config.progress_folder))
    if config.tensorboard_dir is not None:
        sinks.append(TensorBoard(config.tensorboard_dir, config.tensorboard_queue_size, curves))
    if config.wandb_project is not None:
        sinks.append(WeightsAndBiases(config, curves))
    return Log(say, sinks)


def _print(text: str) -> None:
    print(text, flush=True)


def _silent(text: str) -> None:
    """Print nothing: only rank 0 prints."""
