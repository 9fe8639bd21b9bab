"""Megatron-LM's progress.txt in the folder of checkpoints: a line for every start and save.

Fields are separated by tabs. Several jobs, one after the other, append to the file. The cumulative
throughput of a line is the mean over this job and over all jobs right before it with as many ranks.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from megatron.native.files import read_bytes, unlinked
from megatron.training.metrics.records import Record, Saved, Sink, Started

FILE: Final = "progress.txt"
_TIME: Final = "%Y-%m-%d %H:%M:%S"
_FLOPS: Final = "Floating-point operations: "


@dataclass(frozen=True)
class Origin:
    """The start of a job, from which a throughput is counted.

    ``flops`` are the FLOPs of all iterations before that start.
    """

    time: datetime
    flops: float

    def tflops_per_rank(self, time: datetime, flops: float, ranks: int) -> float:
        """Return the throughput from the origin to ``time``."""
        seconds = (time - self.time).total_seconds()
        return (flops - self.flops) / (max(seconds, 1e-9) * ranks * 1e12)


class ProgressFile(Sink):
    """Appends to the file."""

    name = "--log-progress"

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._started: Started | None = None

    def write(self, record: Record) -> None:
        """Append the line of a start or a save."""
        if isinstance(record, Started):
            self._started = record
            self._append(record.time, "Starting job")
        elif isinstance(record, Saved):
            self._append(record.time, *self._of_save(record))

    def _of_save(self, record: Saved) -> list[str]:
        started = self._started
        assert started is not None, "a run starts before it saves"
        fields = [record.event, f"Iteration: {record.iteration}"]
        if record.event == "Saving async checkpoint":
            return fields
        config, ranks = started.config, started.world_size
        per_sample = started.flops / config.train.global_batch_size
        flops = per_sample * record.consumed_samples
        tokens = record.consumed_samples * config.model.seq_length
        job = Origin(started.time, per_sample * started.consumed_samples)
        text = read_bytes(self._path).decode(errors="replace")
        first = origin(text.splitlines(), ranks, job)
        throughputs = (o.tflops_per_rank(record.time, flops, ranks) for o in (job, first))
        return [
            *fields,
            f"Job throughput: {next(throughputs):.1f} TFLOP/s/GPU",
            f"Cumulative throughput: {next(throughputs):.1f} TFLOP/s/GPU",
            f"{_FLOPS}{flops:.2e}",
            f"Tokens (in billions): {tokens / 1e9:.2f}",
        ]

    def _append(self, time: datetime, *fields: str) -> None:
        assert self._started is not None
        head = (
            f"{time:{_TIME}}",
            f"Job ID: {os.getenv('SLURM_JOB_ID', '')}",
            f"# GPUs: {self._started.world_size}",
        )
        with open(self._path, "a", encoding="utf-8", opener=unlinked) as file:
            file.write("\t".join((*head, *fields)) + "\n")


def origin(lines: Iterable[str], ranks: int, job: Origin) -> Origin:
    """Return the start of the first of the latest successive jobs that had ``ranks`` ranks.

    ``lines`` are the lines of the file; lines of another form are passed over. If no start is
    found, ``job`` is returned.
    """
    found, flops = None, 0.0
    for line in lines:
        fields = line.rstrip().split("\t")
        try:
            time = datetime.strptime(fields[0], _TIME).astimezone()
            same = int(fields[2].removeprefix("# GPUs: ")) == ranks
            event = fields[3]
            if fields[-2].startswith(_FLOPS):
                flops = float(fields[-2].removeprefix(_FLOPS))
        except (ValueError, IndexError):
            continue
        if not same:
            found = None
        elif event == "Starting job" and found is None:
            found = Origin(time, flops)
    return found or job
