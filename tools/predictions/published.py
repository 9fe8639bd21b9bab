"""Predictions of published iterations.

A run is made again from its row: the plan of its schedule, the counts of its passes as Megatron-LM
launches them (``megatron_lm.py``), their seconds on its cluster, and the simulator. Micro batch and
chunks that a row does not give are tried in all values that fit the memory, and the fastest counts:
whoever publishes a speed has looked for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from megatron.schedules.costs import Costs
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import CommKind
from megatron.simulator.costs.count import HALF, Collective, Launch, Work, in_order
from megatron.simulator.simulate import Timeline, simulate
from tools.predictions.counted_layer import Shape
from tools.predictions.megatron_lm import WAIT, whole_output_layer
from tools.predictions.published_runs import MACHINE, Choice, PublishedRun

BUCKET: Final = 40e6
"""Parameters of a bucket of ``DistributedDataParallelConfig``, at least; 1e6 for each replica."""


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
    def gpt(self) -> Shape:
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
        passes = {kind: run.version.of(gpt, work) for kind, work in gpt.passes().items()}
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
    """Return the seconds that an exchange beside the passes adds to an iteration.

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
    """Return predictions for all values that the source leaves open, the fastest first."""
    found = [Prediction(run, choice) for choice in run.choices]
    fitting = [each for each in found if each.fits]
    return sorted(fitting or found, key=lambda each: each.seconds)
