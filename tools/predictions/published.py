"""Iterations that others published, and the prediction of each.

A run is made again from its row: the plan of its schedule, the counts of its passes as Megatron-LM
launches them (``megatron_lm.py``), their seconds on its cluster, and the simulator. Micro batch and
chunks that a row does not give are tried in all values that fit the memory, and the fastest counts:
whoever publishes a speed has looked for it.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from megatron.parallel.grid import Grid
from megatron.parallel.placement import Placement
from megatron.schedules.costs import Costs
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import CommKind
from megatron.simulator.costs.cluster import Cluster, SpreadAxis
from megatron.simulator.costs.count import Collective, Launch, Work, in_order
from megatron.simulator.costs.dense_gpt import HALF, DenseGpt, Recomputation, layer
from megatron.simulator.costs.gpus import GPUS, Gpu
from megatron.simulator.simulate import Timeline, simulate
from tools.predictions.megatron_lm import WAIT, Version, whole_output_layer

MACHINE: Final = 8
"""GPUs of a machine: DGX A100, DGX H100 and alike."""

BUCKET: Final = 40e6
"""Parameters of a bucket of ``DistributedDataParallelConfig``, at least; 1e6 for each replica."""

VERSIONS: Final = {
    "SC21 PTD-P": Version(fused_sums=False, beside=False),
    "Selective recompute": Version(),
    "MegaScale Megatron-LM": Version(flash=False, blocking=False),
    "Megatron-LM README": Version(
        flash=True, overlapped=True, sharded=True, blocking=False, dropout=False, tied=False
    ),
}
"""Megatron-LM at the time of each source: April 2021, May 2022, 2023 and 2024."""

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

    def gpt(self, choice: Choice) -> DenseGpt:
        """Return the model and one microbatch; tensor ranks split sequences from 2022 on."""
        split = self.tensor > 1 and self.recomputation != "full"
        unit = 128 * self.tensor
        return DenseGpt(
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
        return Cluster(self.gpu.rates, self.gpu.links(), together)


@dataclass(frozen=True)
class Prediction:
    """The prediction of a run.

    Attributes:
        run: the run.
        choice: what its source leaves open.
    """

    run: PublishedRun
    choice: Choice

    @property
    def error(self) -> float:
        """Predicted time over measured time, minus 1."""
        return self.seconds / self.run.seconds - 1

    @cached_property
    def seconds(self) -> float:
        """Time of an iteration."""
        timeline = self.timeline
        return timeline.end + self._exchange(timeline) + self._tied() + self._step()

    @property
    def microbatches(self) -> int:
        """Microbatches of an iteration."""
        return self.run.global_batch // (self.run.replicas * self.choice.micro_batch)

    @cached_property
    def gpt(self) -> DenseGpt:
        """The model and one microbatch."""
        return self.run.gpt(self.choice)

    @property
    def parameters(self) -> float:
        """Parameters of a rank of the first stage or, where there is one stage, of all."""
        own = self.run.layers // self.run.pipeline * self.gpt.parameters
        whole = self.gpt.vocab_size * self.gpt.hidden_size / self.gpt.tensor
        both = self.run.pipeline == 1 and not self.run.version.tied
        return own + (2 if both else 1) * whole

    @property
    def held(self) -> float:
        """Bytes that the first rank holds: parameters with their state, and layers in flight."""
        run, version = self.run, self.run.version
        p, v = run.pipeline, self.choice.chunks
        states = 12 / (run.replicas if version.sharded else 1)
        layers = run.layers / p * min(p * (1 + (p - 1) / (p * v)), self.microbatches)
        return (HALF + version.gradient_bytes + states) * self.parameters + layers * self.gpt.kept

    @property
    def fits(self) -> bool:
        """Whether its memory suffices."""
        return self.held <= self.run.gpu.usable

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of the passes."""
        run, chunks = self.run, self.choice.chunks
        costs = self._costs()
        schedule = "1f1b" if chunks == 1 else "interleaved"
        plan = make_plan(
            schedule,
            "none",
            run.pipeline,
            self.microbatches,
            costs,
            chunks=None if chunks == 1 else chunks,
            shortened=False,
        )
        return simulate(lower(plan, costs), costs)

    def _costs(self) -> Costs:
        """Return seconds of F and B by rank and chunk, and of transfers."""
        run, cluster, gpt = self.run, self.run.cluster, self.gpt
        passes = {kind: run.version.of(gpt, work) for kind, work in layer(gpt).items()}
        again = passes.pop("R", None)
        forward, backward = cluster.seconds(passes["F"]), cluster.seconds(passes["B"])
        backward += cluster.seconds(again) if again else 0.0
        stages = run.pipeline * self.choice.chunks
        each = run.layers // stages
        times = [[each * forward] * stages, [each * backward] * stages]
        first, last = self._input_layer(), whole_output_layer(gpt, run.version)
        for kind in range(2):
            times[kind][0] += cluster.seconds(first[kind])
            times[kind][-1] += cluster.seconds(last[kind])
        hop = self._transfer()
        if run.version.blocking and stages > 1:
            times[0][:-1] = [time + hop for time in times[0][:-1]]
            times[1][1:] = [time + hop for time in times[1][1:]]
            hop = 0.0
        comms: dict[CommKind, float] = {"X": hop, "G": hop}
        return Costs({"F": self._table(times[0]), "B": self._table(times[1])}, comms)

    def _table(self, times: Sequence[float]) -> list[list[float]]:
        p = self.run.pipeline
        return [list(times[rank::p]) for rank in range(p)]

    def _input_layer(self) -> tuple[Work, Work]:
        """Return what the input layer adds to F and B of the first stage."""
        gpt, size = self.gpt, self.gpt.activation
        rows = gpt.vocab_size // gpt.tensor
        forward = Work((Launch("embedding", 2 * size), Launch("native_dropout", 5 * size // 2)))
        backward = Work((Launch("embedding_backward", size + 3 * HALF * rows * gpt.hidden_size),))
        if gpt.tensor == 1:
            return forward, backward
        summed = Collective("all_reduce", "tensor", gpt.tensor, size)
        return in_order(forward, Work((summed,))), backward

    def _transfer(self) -> float:
        """Return the seconds of a transfer between stages.

        Each tensor rank sends its part, and the receivers gather the parts unless they have parts
        of the sequence (arXiv 2104.04473, section 4.1).
        """
        gpt, cluster = self.gpt, self.run.cluster
        crossing = self.run.gpus > MACHINE
        time = cluster.message(gpt.activation / gpt.tensor, crossing=crossing)
        if gpt.tensor > 1 and not gpt.sequence_parallel:
            gathered = Collective("all_gather", "tensor", gpt.tensor, gpt.activation)
            time += cluster.collective(gathered)
        return time + (WAIT if self.run.version.blocking else 0.0)

    def _exchange(self, timeline: Timeline) -> float:
        """Return what the exchange of gradients and parameters adds to an iteration."""
        run, version = self.run, self.run.version
        if run.replicas == 1:
            return 0.0
        size = version.gradient_bytes * self.parameters
        if not version.overlapped:
            return run.cluster.exchange("data", "all_reduce", run.replicas, size)
        reduced = run.cluster.exchange("data", "reduce_scatter", run.replicas, size)
        gathered = run.cluster.exchange("data", "all_gather", run.replicas, HALF * self.parameters)
        spans = timeline.compute(0)
        last = self._last_passes(timeline)
        first = [
            (span.start, span.end) for span in spans if (span.kind, span.microbatch) == ("F", 0)
        ]
        pieces = max(1.0, self.parameters / max(BUCKET, 1e6 * run.replicas))
        backwards = [(timeline.end - end, timeline.end - start) for start, end in reversed(first)]
        added = exposed(last, reduced, timeline.end, pieces)
        added += exposed(backwards, gathered, timeline.end, pieces)
        crowding = run.cluster.crowding("data", run.replicas)
        return added + crowding * (reduced + gathered)

    def _last_passes(self, timeline: Timeline) -> list[tuple[float, float]]:
        """Return begin and end of the last B of each chunk of the first rank."""
        last = {s.chunk: (s.start, s.end) for s in timeline.compute(0) if s.kind == "B"}
        return sorted(last.values())

    def _tied(self) -> float:
        """Return the seconds in which two stages add up the gradients of a shared embedding."""
        run, gpt = self.run, self.gpt
        if not run.version.tied or run.pipeline == 1:
            return 0.0
        size = run.version.gradient_bytes * gpt.vocab_size * gpt.hidden_size / gpt.tensor
        return run.cluster.exchange("column", "all_reduce", 2, size)

    def _step(self) -> float:
        """Return the seconds of the optimizer's step."""
        shards = self.run.replicas if self.run.version.sharded else 1
        moved = self.run.version.step_bytes * self.parameters / shards
        return self.run.cluster.rates.traffic(moved)


def exposed(
    passes: Sequence[tuple[float, float]], seconds: float, end: float, pieces: float
) -> float:
    """Return what an exchange adds that goes along with the passes, chunk by chunk.

    Gradients of a chunk are complete piece by piece during its last B. The exchange follows, and
    the last piece comes after the pass. Read backwards in time, a gathering before the first F of
    every chunk is the same.

    Args:
        passes: begin and end of each chunk's pass, in order.
        seconds: of the whole exchange.
        end: of the iteration without the exchange.
        pieces: of the exchange.
    """
    done, each = 0.0, seconds / len(passes)
    for start, finish in passes:
        done = max(max(done, start) + each, finish + seconds / pieces)
    return max(0.0, done - end)


def predict(run: PublishedRun) -> list[Prediction]:
    """Return the predictions of a run for all that its source leaves open, the fastest first."""
    found = [Prediction(run, choice) for choice in run.choices]
    fitting = [each for each in found if each.fits]
    return sorted(fitting or found, key=lambda each: each.seconds)


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
