"""Prints the lines of a run, and gives its records to sinks; a sink that fails ends no run."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TextIO

from megatron.run.records import RecordSettings
from megatron.training.metrics.curves import Curves
from megatron.training.metrics.json_lines import JsonLines
from megatron.training.metrics.log_line import (
    evaluation_lines,
    generation_lines,
    iteration_line,
    load_lines,
)
from megatron.training.metrics.progress_file import ProgressFile
from megatron.training.metrics.records import Evaluation, Generated, Interval, Record, Sink
from megatron.training.metrics.tensorboard import TensorBoard
from megatron.training.metrics.weights_and_biases import WeightsAndBiases

Say = Callable[[str], None]
"""Prints lines; only rank 0 does."""


class Lines(Sink):
    """Prints Megatron's lines, and below each training line the loads of experts if wanted."""

    name = "the printed lines"

    def __init__(self, say: Say, *, with_loads: bool = False) -> None:
        self._say = say
        self._with_loads = with_loads

    def write(self, record: Record) -> None:
        """Print a record for which Megatron has a line."""
        if isinstance(record, Interval):
            self._say(iteration_line(record))
            for line in load_lines(record) if self._with_loads else ():
                self._say(line)
        elif isinstance(record, Evaluation):
            self._say(evaluation_lines(record))
        elif isinstance(record, Generated):
            for line in generation_lines(record):
                self._say(line)


class Log:
    """The output of a run: lines for people, and records. On ranks other than 0 it stays silent.

    As a context manager the log closes its sinks if the context ends by an error.
    """

    def __init__(self, say: Say, sinks: Sequence[Sink] = ()) -> None:
        self._say = say
        self._sinks = sinks
        self._failing: set[str] = set()

    @property
    def wants_ranks(self) -> bool:
        """Whether a sink uses the figures of every rank."""
        return any(sink.wants_ranks for sink in self._sinks)

    def say(self, text: str) -> None:
        """Print a line."""
        self._say(text)

    def write(self, record: Record) -> None:
        """Give a record to every sink."""
        for sink in self._sinks:
            self._attempt(sink, partial(sink.write, record))

    def close(self, failed: bool = False) -> None:
        """Close every sink; ``failed``: the run ends by an error."""
        for sink in self._sinks:
            self._attempt(sink, partial(sink.close, failed))
        self._sinks = ()

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.close(failed=True)

    def _attempt(self, sink: Sink, work: Callable[[], None]) -> None:
        """Do ``work``; tell a failure once, and try again with the next record."""
        try:
            work()
        except OSError as error:
            if sink.name not in self._failing:
                self._failing.add(sink.name)
                self.say(f"{sink.name}: {error}; training goes on without these records")


def open_log(
    config: RecordSettings, rank: int, world_size: int, stream: TextIO | None = None
) -> Log:
    """Return the log of ``rank``; nothing is written before the first record.

    The live display uses ``stream``, by default standard output.
    """
    if rank > 0:
        return Log(_silent)
    stream = stream or sys.stdout
    sinks: list[Sink] = []
    say = print_now
    if not config.no_live_display and stream.isatty():
        # Only here, because most ranks and most runs have no terminal, and need no rich.
        from megatron.training.metrics.live_display import LiveDisplay, Terminal

        if (terminal := Terminal(stream)).can_show:
            display = LiveDisplay(terminal)
            sinks.append(display)
            say = display.say
    sinks.append(Lines(say, with_loads=config.log_expert_loads))
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


def print_now(text: str) -> None:
    """Print a line at once, even into a pipe or a file."""
    print(text, flush=True)


def _silent(text: str) -> None:
    """Print nothing: only rank 0 prints."""
