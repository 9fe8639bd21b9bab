"""Iterations that others published: rows of docs/reference/published_runs.csv."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from megatron.parallel.grid import Grid
from megatron.parallel.placement import Placement
from megatron.simulator.costs.cluster import Cluster, SpreadAxis
from megatron.simulator.costs.gpus import GPUS, Gpu
from megatron.simulator.costs.launch_time import Rates
from tools.predictions.counted_layer import Recomputation, Shape
from tools.predictions.megatron_lm import Version

MACHINE: Final = 8
"""GPUs of a machine: DGX A100, DGX H100 and alike."""

VERSIONS: Final = {
    "SC21 PTD-P": Version(fused_sums=False, beside=False),
    "Selective recompute": Version(),
    "MegaScale Megatron-LM": Version(flash=False, blocking=False),
    "Megatron-LM README": Version(
        flash=True, overlapped=True, sharded=True, blocking=False, dropout=False, tied=False
    ),
}
"""Megatron-LM at the time of each source: April 2021, May 2022, 2023 and 2024."""

KEPT_OUT: Final = 3
"""Every third row was kept out of the calibration."""

FIT_ROWS: Final = range(12, 29)
FIT_BELOW: Final = 20
"""Rows by their id, and pipeline ranks from which on a simulation takes too long to be repeated: of
these rows, ``calibrate.py`` takes those that were not kept out."""

MICRO_BATCHES: Final = (1, 2, 4)


@dataclass(frozen=True)
class Choice:
    """What a source may leave open.

    Attributes:
        micro_batch: sequences of a microbatch.
        chunks: model chunks of a pipeline rank.
    """

    micro_batch: int
    chunks: int


@dataclass(frozen=True)
class PublishedRun:
    """A row of docs/reference/published_runs.csv.

    Attributes:
        number: its ``id``.
        origin: the source.
        model: its name.
        hidden_size: h.
        layers: transformer layers.
        heads: query heads.
        gpu: the kind of GPU.
        tensor: tensor-parallel ranks t.
        pipeline: pipeline ranks p.
        replicas: d.
        global_batch: sequences of an iteration.
        seq_length: tokens of a sequence.
        vocab_size: vocabulary entries.
        recompute: as the row says: full, selective+SP, or nothing.
        micro_batch: 0 where the source does not say.
        chunks: 0 where the source does not say.
        seconds: measured, of an iteration.
        rates: of a GPU; ``None``: those of its kind.
    """

    number: int
    origin: str
    model: str
    hidden_size: int
    layers: int
    heads: int
    gpu: Gpu
    tensor: int
    pipeline: int
    replicas: int
    global_batch: int
    seq_length: int
    vocab_size: int
    recompute: str
    micro_batch: int
    chunks: int
    seconds: float
    rates: Rates | None = None

    @property
    def version(self) -> Version:
        """The Megatron-LM that ran."""
        return VERSIONS[self.origin]

    @property
    def gpus(self) -> int:
        """GPUs of the run."""
        return self.tensor * self.pipeline * self.replicas

    @property
    def choices(self) -> Iterator[Choice]:
        """What the source leaves open, in all values that the row allows."""
        each = self.global_batch // self.replicas
        sizes = [size for size in MICRO_BATCHES if each % size == 0]
        own, rest = divmod(self.layers, self.pipeline)
        assert not rest, f"row {self.number}: {self.layers} layers on {self.pipeline} ranks"
        for size in (self.micro_batch,) if self.micro_batch else sizes:
            whole = each // size % self.pipeline == 0
            several = [n for n in range(2, own + 1) if own % n == 0 and whole and self.pipeline > 1]
            for chunks in (self.chunks,) if self.chunks else (1, *several):
                yield Choice(size, chunks)

    @property
    def recomputation(self) -> Recomputation:
        """What B computes again; MegaScale's baseline is taken to run as 2205.05198 does."""
        if self.recompute == "full":
            return "full"
        return "none" if self.version.flash else "selective"

    def gpt(self, choice: Choice) -> Shape:
        """Return the model and one microbatch; tensor ranks split sequences from 2022 on."""
        split = self.tensor > 1 and self.recomputation != "full"
        unit = 128 * self.tensor
        return Shape(
            self.hidden_size,
            self.heads,
            self.seq_length,
            -(-self.vocab_size // unit) * unit,
            choice.micro_batch,
            dropout=self.version.dropout,
            tensor=self.tensor,
            sequence_parallel=split,
            recomputation=self.recomputation,
        )

    @cached_property
    def cluster(self) -> Cluster:
        """GPUs and links. Ranks of a layer are neighbours, then replicas, then stages."""
        where = Placement(Grid(self.tensor, self.replicas, self.pipeline), MACHINE)
        together: dict[SpreadAxis, int] = {
            "tensor": where.together("tensor"),
            "data": where.together("data"),
            "column": where.together("pipeline"),
        }
        return Cluster(self.rates or self.gpu.rates, self.gpu.links(), together)


def is_kept_out(index: int) -> bool:
    """Return whether the row of that index, from 0 on, was kept out of the calibration."""
    return index % KEPT_OUT == KEPT_OUT - 1


def is_fitted(index: int, run: PublishedRun) -> bool:
    """Return whether a constant was fitted to the row of that index, from 0 on."""
    return run.number in FIT_ROWS and run.pipeline < FIT_BELOW and not is_kept_out(index)


def read_published(path: Path) -> list[PublishedRun]:
    """Read the table of published runs.

    Raises:
        ValueError: if the file cannot be read.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [_run(row) for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, KeyError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error


def _run(row: dict[str, str]) -> PublishedRun:
    name, hidden, layers = row["model"].rsplit(" ", 2)

    def number(column: str) -> int:
        return int(row[column] or 0)

    run = PublishedRun(
        number("id"),
        row["origin"],
        name,
        int(hidden[1:]),
        int(layers[1:]),
        number("heads"),
        GPUS[row["hardware"].split("-")[0].split(" ")[0]],
        number("tp"),
        number("pp"),
        number("dp"),
        number("global_batch"),
        number("seq"),
        number("vocab"),
        row["recompute"],
        number("micro_batch"),
        number("vpp"),
        float(row["step_time_s"] or 0),
    )
    if run.seconds:
        return run
    return replace(
        run, seconds=_iteration_flops(run) / (run.gpus * 1e12 * float(row["tflops_per_gpu"]))
    )


def _iteration_flops(run: PublishedRun) -> float:
    """Return the FLOPs by which a source gives TFLOP/s, attention in full.

    Equation 3 of arXiv 2104.04473 counts four passes where B computes the layer again. The README
    of Megatron-LM counts three: its TFLOP/s over 989 are its MFU.
    """
    h, s = run.hidden_size, run.seq_length
    again = run.recompute == "full"
    tokens = run.global_batch * s
    layers = (96 if again else 72) * tokens * run.layers * h**2 * (1 + s / (6 * h))
    return layers + 6 * tokens * h * run.vocab_size
