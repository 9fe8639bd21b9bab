"""The runs of arXiv 2411.05288 from the counts of their passes.

They ran Megatron-LM of 2024 with flash attention, and passes of the vocabulary from PyTorch's own
operators (github.com/sail-sg/VocabularyParallelism). One rank has a layer, so t is 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final

from megatron.schedules.costs import Costs, HopTime, Time
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import CommKind
from megatron.schedules.passes import PassKind
from megatron.schedules.treatments import FP32_OF_A_TOKEN, TREATMENTS, Payload, Treatment
from megatron.simulator.costs.cluster import Cluster
from megatron.simulator.costs.count import Launch, Step, Work
from megatron.simulator.costs.dense_gpt import FULL, DenseGpt, layer, product
from megatron.simulator.costs.gpus import GPUS
from megatron.simulator.costs.redistribute import redistribute_stages
from megatron.simulator.crowding import CHANNELS, crowded
from megatron.simulator.simulate import simulate
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


def vocabulary_passes(gpt: DenseGpt, shards: int, treatment: Treatment) -> dict[PassKind, Work]:
    """Return the passes of a shard of the vocabulary, without the host's part.

    Args:
        gpt: the model.
        shards: ranks that the vocabulary is split over.
        treatment: says which pass forms the input gradient.
    """
    n, h, rows = gpt.tokens, gpt.hidden_size, gpt.vocab_size // shards
    early = treatment.gradient_pass == "S"
    gradient: list[Step] = [product("mm", n, h, rows)]
    forward = (LOSS_FORWARD + early * EARLY_GRADIENT) * n * rows
    backward = (LOSS_BACKWARD + RESCALE) * n * rows
    s = [product("mm", n, rows, h), Launch("exponentials", forward), *(gradient if early else [])]
    t: list[Step] = [Launch("gradient", backward), *([] if early else gradient)]
    return {
        "S": Work(tuple(s)),
        "T": Work((*t, product("addmm", rows, h, n, adds=True))),
        "IF": Work((Launch("embedding", 2 * gpt.activation),)),
        "IB": Work((Launch("embedding_backward", DENSE_GRADIENT * rows * h),)),
    }


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

    gpt: DenseGpt
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
        treatment, chunks = TREATMENTS[self.vocabulary], 2 if self.schedule == "v-half" else 1
        p = self.ranks
        stages = [(rank, 0) for rank in range(p)]
        if chunks == 2:
            stages += [(rank, 1) for rank in reversed(range(p))]
        costs = self._costs(stages, treatment)
        plan = make_plan(
            self.schedule,
            self.vocabulary,
            p,
            self.microbatches,
            costs,
            shortened=self.shortened,
        )
        program = lower(plan, costs)
        share = CHANNELS / self.cluster.rates.multiprocessors
        end = simulate(program, crowded(program, costs, share)).end
        return end + self._step(max(self._stage_layers(stages, treatment)))

    def _step(self, layers: int) -> float:
        rows = self.gpt.vocab_size // (self.ranks if TREATMENTS[self.vocabulary].is_sharded else 1)
        chunks = 2 if self.schedule == "v-half" else 1
        parameters = chunks * layers * self.gpt.parameters + rows * self.gpt.hidden_size
        return self.cluster.rates.traffic(SEPARATE_STEP * parameters)

    @cached_property
    def _layer(self) -> dict[PassKind, float]:
        passes = layer(self.gpt, split=self.schedule == "v-half")
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
        split = self.schedule == "v-half"
        later = cluster.seconds(Work((weights,)))
        before = cluster.seconds(Work(tuple(input_gradient)))
        first: dict[PassKind, float] = {
            "F": cluster.seconds(ends["IF"]),
            "W" if split else "B": cluster.seconds(ends["IB"]),
        }
        last: dict[PassKind, float] = {"F": cluster.seconds(forward), "B": before}
        if split:
            last["W"] = later
        else:
            last["B"] += later
        return [first, last]

    def _stage_layers(
        self, stages: Sequence[tuple[int, int]], treatment: Treatment
    ) -> Sequence[int]:
        if not treatment.redistributed:
            return [self.layers // len(stages)] * len(stages)
        extras = [0.0] * len(stages)
        for index, own in zip((0, -1), self._whole, strict=True):
            extras[index] += sum(own.values())
        return redistribute_stages(self.layers, stages, sum(self._layer.values()), extras)

    def _costs(self, stages: Sequence[tuple[int, int]], treatment: Treatment) -> Costs:
        layers = self._stage_layers(stages, treatment)
        times = {kind: [count * one for count in layers] for kind, one in self._layer.items()}
        if not treatment.is_sharded:
            for index, own in zip((0, -1), self._whole, strict=True):
                for kind, extra in own.items():
                    times[kind][index] += extra
        hops = self._hops(stages)
        times["F"][:-1] = [time + hop for time, hop in zip(times["F"], hops, strict=False)]
        times["B"][1:] = [time + hop for time, hop in zip(times["B"][1:], hops, strict=True)]
        passes: dict[PassKind, Time] = {
            kind: self._table(stages, own) for kind, own in times.items()
        }
        if treatment.is_sharded:
            works = vocabulary_passes(self.gpt, self.ranks, treatment)
            for kind in treatment.passes:
                passes[kind] = self.cluster.seconds(works[kind]) + HOST[kind]
        return Costs(passes, self._communications(treatment))

    def _table(self, stages: Sequence[tuple[int, int]], times: Sequence[float]) -> Time:
        table = [[0.0] * (len(stages) // self.ranks) for _ in range(self.ranks)]
        for (rank, chunk), time in zip(stages, times, strict=True):
            table[rank][chunk] = time
        return table

    def _hops(self, stages: Sequence[tuple[int, int]]) -> list[float]:
        """Return the seconds of a transfer from each stage to the next, which passes wait for."""
        return [
            WAIT
            + self.cluster.message(self.gpt.activation, crossing=one // MACHINE != other // MACHINE)
            if one != other
            else 0.0
            for one, other in pairwise(rank for rank, _ in stages)
        ]

    def _communications(self, treatment: Treatment) -> dict[CommKind, HopTime]:
        size = self.gpt.activation
        comms: dict[CommKind, HopTime] = {}
        if treatment.is_sharded:
            spread = self.cluster.exchange("column", "broadcast", self.ranks, size)
            comms |= {"C0": spread, "CIB": spread, "CIF": self._payload("gradient")}
        for barrier in treatment.barriers:
            comms[barrier.kind] = sum(map(self._payload, barrier.carries))
        return comms

    def _payload(self, payload: Payload) -> float:
        if payload == "gradient":
            return self.cluster.exchange("column", "reduce", self.ranks, self.gpt.activation)
        size = FULL * FP32_OF_A_TOKEN[payload] * self.gpt.tokens
        return self.cluster.exchange("column", "all_reduce", self.ranks, size)
