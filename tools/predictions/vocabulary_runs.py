"""The runs of arXiv 2411.05288 from the counts of their passes.

They ran Megatron-LM of 2024 with flash attention, and passes of the vocabulary from PyTorch's own
operators (github.com/sail-sg/VocabularyParallelism). One rank has a layer, so t is 1.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Final

from megatron.schedules.costs import Costs, HopTime, Time
from megatron.schedules.lower import Program, lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import CommKind
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan
from megatron.schedules.treatments import FP32_OF_A_TOKEN, TREATMENTS, Payload, Treatment
from megatron.simulator.clocks import Clocks
from megatron.simulator.costs.cluster import Cluster
from megatron.simulator.costs.count import (
    FULL,
    HALF,
    CollectiveKind,
    Launch,
    Step,
    Work,
    product,
)
from megatron.simulator.costs.gpus import GPUS
from megatron.simulator.costs.redistribute import redistribute_stages
from megatron.simulator.crowding import CHANNELS, crowded
from megatron.simulator.simulate import simulate
from tools.predictions.counted_layer import Shape
from tools.predictions.megatron_lm import (
    LOSS_BACKWARD,
    LOSS_FORWARD,
    SEPARATE_STEP,
    WAIT,
    Version,
    whole_output_layer,
)

MACHINE: Final = 8
VERSION: Final = Version(flash=True)

EARLY_GRADIENT: Final = 6
RESCALE: Final = 8
"""Bytes of a logit in S of Algorithm 2, to 16 bits, and in T, where the shards' maxima differ."""

DENSE_GRADIENT: Final = 8
"""Bytes of a parameter in IB: zeros (2), then a sum of 16-bit numbers (6)."""

HOST: Final[Mapping[PassKind, float]] = {"S": 200e-6, "T": 200e-6, "IF": 450e-6, "IB": 280e-6}
"""Seconds in which passes of the vocabulary wait for the host, which issues some 20 small operators
for each and cannot be ahead after ``torch.cuda.synchronize``. Measured: the rests of these passes
in docs/reference/a100_8gpu_seq2048.csv, alike for all vocabularies (``pass_times.py``)."""


LOSS_HOST: Final = 450e-6
"""The same of F and of B of a whole output layer: their rests there at 32k, 462 and 465 us."""


def vocabulary_passes(gpt: Shape, shards: int, treatment: Treatment) -> dict[PassKind, Work]:
    """Return the passes of a shard of the vocabulary, without the host's part.

    Args:
        gpt: the model.
        shards: ranks that the vocabulary is split over.
        treatment: says which pass forms the input gradient.
    """
    n, h, rows = gpt.tokens, gpt.hidden_size, gpt.vocab_size // shards
    early = treatment.gradient_pass == "S"
    gradient: list[Step] = [product(n, h, rows)]
    forward = (LOSS_FORWARD + early * EARLY_GRADIENT) * n * rows
    backward = (LOSS_BACKWARD + RESCALE) * n * rows
    s = [product(n, rows, h), Launch("exponentials", forward), *(gradient if early else [])]
    t: list[Step] = [Launch("gradient", backward), *([] if early else gradient)]
    return {
        "S": Work(tuple(s)),
        "T": Work((*t, product(rows, h, n, written=2 * FULL))),
        "IF": Work((Launch("embedding", 2 * gpt.activation),)),
        "IB": Work((Launch("embedding_backward", DENSE_GRADIENT * rows * h),)),
    }


def with_prompt_gradients(program: Program, costs: Costs) -> Plan:
    """Return the plan with each IB before the first pass that begins with its gradient there.

    Args:
        program: of a plan with a split vocabulary, without slices.
        costs: durations, which tell when the broadcast of a gradient ends.
    """
    timeline, there = simulate(program, costs), dict[int, float]()
    for span in timeline.spans:
        if span.kind == "CIB":
            there[span.microbatch] = max(span.end, there.get(span.microbatch, 0.0))
    rows = []
    for rank, row in enumerate(program.plan.rows):
        starts = {span.label: span.start for span in timeline.compute(rank)}
        gradients = (item for item in row if item.kind == "IB")
        waiting = deque(sorted(gradients, key=lambda item: there[item.microbatch]))
        made = list[Pass]()
        for item in row:
            while waiting and there[waiting[0].microbatch] <= starts[str(item)]:
                made.append(waiting.popleft())
            made += [item] * (item.kind != "IB")
        rows.append((*made, *waiting))
    return replace(program.plan, rows=tuple(rows))


@dataclass(frozen=True)
class VocabularyRun:
    """A run of the paper.

    Attributes:
        gpt: the model and one microbatch.
        layers: transformer layers.
        ranks: pipeline ranks p, one to a GPU.
        microbatches: of an iteration.
        schedule: a name of ``SCHEDULES``.
        vocabulary: a treatment.
        shortened: whether to fill idle time.
    """

    gpt: Shape
    layers: int
    ranks: int
    microbatches: int
    schedule: str
    vocabulary: str
    shortened: bool

    @property
    def cluster(self) -> Cluster:
        """Its A100s."""
        gpu = GPUS["A100"]
        return Cluster(gpu.rates, gpu.links(), {"column": MACHINE})

    @property
    def mfu(self) -> float:
        """Model FLOPs, attention in full, as a share of the peak."""
        n, h = self.gpt.tokens, self.gpt.hidden_size
        forward = self.layers * (24 * n * h**2 + 4 * n * self.gpt.seq_length * h)
        flops = 3 * self.microbatches * (forward + 2 * n * h * self.gpt.vocab_size)
        return flops / (self.ranks * self.cluster.rates.peak_flops * self.seconds)

    @cached_property
    def seconds(self) -> float:
        """Time of an iteration."""
        program, costs = self.program, self.costs
        share = CHANNELS / self.cluster.rates.multiprocessors
        alone = Clocks(program, costs)
        end = Clocks(alone.numbered, crowded(alone, costs, share)).end
        return end + self._step

    @cached_property
    def program(self) -> Program:
        """The program of the run.

        Where idle time is filled, IB would wait for a hundred microbatches, and the gradients that
        wait would take 5 to 15 % more memory. The authors' IB comes two microbatches after its B
        (``passes.py``), so IB does not wait here.
        """
        plan = make_plan(
            self.schedule,
            self.vocabulary,
            self.ranks,
            self.microbatches,
            self.costs,
            shortened=self.shortened,
        )
        program = lower(plan, self.costs)
        if not (self.shortened and self.treatment.is_sharded):
            return program
        return lower(with_prompt_gradients(program, self.costs), self.costs)

    @property
    def treatment(self) -> Treatment:
        """The treatment of the vocabulary layers."""
        return TREATMENTS[self.vocabulary]

    @property
    def shards(self) -> int:
        """Ranks that the vocabulary is split over."""
        return self.ranks if self.treatment.is_sharded else 1

    @property
    def blocking(self) -> bool:
        """Whether transfers between stages run between passes, and not beside them.

        Those of Megatron-LM's 1F1B do. V-Half's run-time (``zerobubble/runtime.py`` in
        github.com/sail-sg/zero-bubble-pipeline-parallelism) posts a receive ahead of its pass, and
        goes on after a send.
        """
        return self.schedule != "v-half"

    @property
    def chunks(self) -> int:
        """Chunks of a rank."""
        return 2 if self.schedule == "v-half" else 1

    @cached_property
    def stages(self) -> Sequence[tuple[int, int]]:
        """Rank and chunk of every stage, in the order of the data."""
        there = [(rank, 0) for rank in range(self.ranks)]
        back = [(rank, 1) for rank in reversed(range(self.ranks))]
        return there + (back if self.chunks > 1 else [])

    @property
    def _step(self) -> float:
        rows = self.gpt.vocab_size // self.shards
        layers = self.chunks * max(self.stage_layers)
        parameters = layers * self.gpt.parameters + rows * self.gpt.hidden_size
        return self.cluster.rates.traffic(SEPARATE_STEP * parameters)

    @cached_property
    def _layer(self) -> dict[PassKind, float]:
        passes = self.gpt.passes(split=self.chunks > 1)
        return {
            kind: self.cluster.seconds(VERSION.of(self.gpt, work)) for kind, work in passes.items()
        }

    @cached_property
    def _whole(self) -> list[dict[PassKind, float]]:
        """Times of whole input and output layers by pass."""
        gpt, cluster = self.gpt, self.cluster
        ends = vocabulary_passes(gpt, 1, TREATMENTS["vocab-1"])
        forward, backward = whole_output_layer(gpt, VERSION)
        *input_gradient, weights = backward.steps
        split = self.chunks > 1
        later = cluster.seconds(Work((weights,)))
        before = cluster.seconds(Work(tuple(input_gradient)))
        first: dict[PassKind, float] = {
            "F": cluster.seconds(ends["IF"]),
            "W" if split else "B": cluster.seconds(ends["IB"]),
        }
        last: dict[PassKind, float] = {
            "F": cluster.seconds(forward) + LOSS_HOST,
            "B": before + LOSS_HOST,
        }
        if split:
            last["W"] = later
        else:
            last["B"] += later
        return [first, last]

    @cached_property
    def stage_layers(self) -> Sequence[int]:
        """Transformer layers of every stage."""
        stages = self.stages
        if not self.treatment.redistributed:
            return [self.layers // len(stages)] * len(stages)
        extras = [0.0] * len(stages)
        for index, own in zip((0, -1), self._whole, strict=True):
            extras[index] += sum(own.values())
        return redistribute_stages(self.layers, stages, sum(self._layer.values()), extras)

    @cached_property
    def costs(self) -> Costs:
        """Seconds of passes, and of communications that run beside them."""
        treatment, stages = self.treatment, self.stages
        times = {
            kind: [count * one for count in self.stage_layers] for kind, one in self._layer.items()
        }
        if not treatment.is_sharded:
            for index, own in zip((0, -1), self._whole, strict=True):
                for kind, extra in own.items():
                    times[kind][index] += extra
        hops = self._hops(stages)
        if self.blocking:
            waits = [hop + WAIT if hop else 0.0 for hop in hops]
            times["F"][:-1] = [time + wait for time, wait in zip(times["F"], waits, strict=False)]
            times["B"][1:] = [time + wait for time, wait in zip(times["B"][1:], waits, strict=True)]
        passes: dict[PassKind, Time] = {
            kind: self._table(stages, own) for kind, own in times.items()
        }
        if treatment.is_sharded:
            works = vocabulary_passes(self.gpt, self.ranks, treatment)
            for kind in treatment.passes:
                passes[kind] = self.cluster.seconds(works[kind]) + HOST[kind]
        return Costs(passes, self._communications(treatment, hops))

    def _table(self, stages: Sequence[tuple[int, int]], times: Sequence[float]) -> Time:
        table = [[0.0] * (len(stages) // self.ranks) for _ in range(self.ranks)]
        for (rank, chunk), time in zip(stages, times, strict=True):
            table[rank][chunk] = time
        return table

    def _hops(self, stages: Sequence[tuple[int, int]]) -> list[float]:
        """Return the seconds of a transfer's bytes from each stage to the next."""
        return [
            self.cluster.message(self.gpt.activation, crossing=one // MACHINE != other // MACHINE)
            if one != other
            else 0.0
            for one, other in pairwise(rank for rank, _ in stages)
        ]

    def _communications(
        self, treatment: Treatment, hops: Sequence[float]
    ) -> dict[CommKind, HopTime]:
        """Return the seconds of what runs beside passes: collectives, and transfers that can.

        Sums go to all ranks, and C0 is in fp32 if it can.
        """
        comms: dict[CommKind, HopTime] = {}
        if not self.blocking:
            comms |= {"X": hops, "G": hops}
        if treatment.is_sharded:
            comms["C0"] = self._spread(HALF if treatment.synchronous else FULL)
            comms |= {"CIB": self._spread(HALF), "CIF": self._payload("gradient")}
        for barrier in treatment.barriers:
            comms[barrier.kind] = sum(map(self._payload, barrier.carries))
        return comms

    def _spread(self, width: int) -> float:
        return self._exchange("broadcast", width * self.gpt.tokens * self.gpt.hidden_size)

    def _payload(self, payload: Payload) -> float:
        if payload == "gradient":
            return self._exchange("all_reduce", self.gpt.activation)
        return FP32_OF_A_TOKEN[payload] * self._exchange("all_reduce", FULL * self.gpt.tokens)

    def _exchange(self, kind: CollectiveKind, size: float) -> float:
        return self.cluster.exchange("column", kind, self.ranks, size)
