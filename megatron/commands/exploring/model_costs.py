"""Costs and memory of a model on a kind of GPU: its closed-form counts, priced as a dry run does.

Unlike a dry run, passes beside collectives are not slower.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, NamedTuple

from megatron.commands.exploring.replica_job import ReplicaJob
from megatron.schedules.costs import Costs
from megatron.schedules.lower import Program
from megatron.schedules.make_plan import one_microbatch_of
from megatron.schedules.plan import Plan, plan_of_one
from megatron.schedules.plan_file import load_any_plan
from megatron.schedules.request import Request
from megatron.simulator.costs.cluster import Cluster
from megatron.simulator.costs.count import RankCount
from megatron.simulator.costs.counted_costs import costs_of
from megatron.simulator.costs.dense_gpt import DenseGpt, dense_counts, layer_counts
from megatron.simulator.costs.gpus import GPUS, Gpu
from megatron.simulator.costs.rank_memory import RankMemory, peaks
from megatron.simulator.costs.redistribute import redistribute, redistribute_stages
from megatron.simulator.forecast import Forecast
from megatron.simulator.simulate import Timeline

WEIGHT_BYTES: Final = 2
GRADIENT_BYTES: Final = 4
STATE_BYTES: Final = 12
"""Bytes of a parameter: its bf16 weight, its fp32 gradient, Adam's master weight and moments."""

STEP_BYTES: Final = 34
"""Bytes that a step moves for a parameter: the norm reads the gradient; the step reads gradient and
state, and writes state and weight."""


class ModelCosts(NamedTuple):
    """Costs of a model on the stages of a plan.

    Attributes:
        costs: in seconds.
        memories: of every rank, in bytes.
        layers: transformer layers of every stage.
    """

    costs: Costs
    memories: Sequence[RankMemory]
    layers: tuple[int, ...]


_COUNTS: Final = (
    *("layers", "hidden", "heads", "groups", "ffn", "seq", "vocabulary", "batch", "machine"),
)


@dataclass(frozen=True)
class ModelJob:
    """A model with separate input and output layers, trained in bf16 with Adam.

    Attributes:
        gpu: name of the GPU of every rank.
        kind: ``gpt`` has LayerNorm, biases, learned positions and an MLP of two matrices; ``llama``
            has RMSNorm, no biases, rotated queries and a gated MLP.
        layers: transformer layers.
        hidden: width h.
        heads: query heads.
        groups: key-value heads.
        ffn: inner width of the MLP.
        seq: tokens of a sequence.
        vocabulary: entries V.
        batch: sequences of a microbatch.
        machine: GPUs of a machine; the pipeline's ranks fill one machine after the other.
        recompute: every layer is computed again in the backward.

    Raises:
        ValueError: for an unknown name, or a number that is out of range; the message names it.
    """

    gpu: str = "H100"
    kind: str = "gpt"
    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    groups: int = 32
    ffn: int = 16384
    seq: int = 2048
    vocabulary: int = 256000
    batch: int = 1
    machine: int = 8
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.gpu not in GPUS:
            raise ValueError(f"the GPU {self.gpu} is not known: choose one of {', '.join(GPUS)}")
        if self.kind not in ("gpt", "llama"):
            raise ValueError(f"a model of kind {self.kind} is not known: choose gpt or llama")
        for name in _COUNTS:
            if not 1 <= getattr(self, name) <= 10**7:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number from 1 to 10^7")
        if self.hidden % self.heads or self.heads % self.groups:
            raise ValueError(
                f"{self.heads} heads must divide the width {self.hidden}, and {self.groups} "
                f"key-value heads the {self.heads} heads: choose others"
            )

    @property
    def device(self) -> Gpu:
        """The GPU of every rank."""
        return GPUS[self.gpu]

    def dense(self, shards: int) -> DenseGpt:
        """Return the model and one microbatch.

        Args:
            shards: parts of the vocabulary, which is padded to a multiple of 128 of them.
        """
        unit = 128 * shards
        return DenseGpt(
            self.hidden,
            self.heads,
            self.groups,
            self.ffn,
            self.seq,
            -(-self.vocabulary // unit) * unit,
            self.batch,
            llama=self.kind == "llama",
            recomputes=self.recompute,
        )

    def flops(self, microbatches: int) -> int:
        """Return the FLOPs of an iteration, as ``megatron/model/flops.py`` defines them."""
        tokens, h = microbatches * self.batch * self.seq, self.hidden
        keys_values = 2 * h * self.groups // self.heads
        inner = (3 if self.kind == "llama" else 2) * self.ffn
        layer = 2 * tokens * h * (2 * h + keys_values + inner) + 4 * tokens * self.seq * h
        return 3 * (self.layers * layer + 2 * tokens * h * self.vocabulary)

    def costs_of(self, request: Request, replicas: ReplicaJob | None = None) -> ModelCosts:
        """Return the costs and the memory on the stages of a plan; the plan itself is not made.

        Args:
            request: for the plan.
            replicas: of the pipeline; ``None``: there is one pipeline.

        Raises:
            ValueError: there are fewer layers than stages, or slices of equal length do not divide
                the sequence.
        """
        file = request.file
        one = one_microbatch_of(request) if file is None else plan_of_one(load_any_plan(file))
        if self.layers < len(one.stages):
            raise ValueError(
                f"{self.layers} layers are fewer than the {len(one.stages)} stages: give the model "
                "more layers, or the pipeline fewer ranks or chunks"
            )
        if self.seq % one.slices:
            raise ValueError(
                f"{one.slices} slices of equal length do not divide {self.seq} tokens: choose "
                "another number of slices, or another length"
            )
        gpt = self.dense(request.ranks if request.treatment.is_sharded else 1)
        even = tuple(redistribute(self.layers, len(one.stages), 1.0, [0.0] * len(one.stages)))
        layers = self._balanced(gpt, one) if request.treatment.redistributed else even
        counts = dense_counts(gpt, one, layers)
        costs = costs_of(counts, one, self._cluster(request.ranks), self._crossing(request.ranks))
        if replicas is not None:
            costs = replicas.added_to(
                costs,
                self._cluster(request.ranks),
                [count.parameters.all for count in counts],
                self._updates(counts, replicas),
                len(replicas.even_buckets.of(one)[0]),
            )
        return ModelCosts(costs, self._memories(counts, _parts(replicas)), layers)

    def forecast(
        self,
        request: Request,
        program: Program,
        timeline: Timeline,
        costs: ModelCosts,
        replicas: ReplicaJob | None = None,
    ) -> Forecast:
        """Return the forecast of an iteration, with the optimizer's step.

        Args:
            request: for the plan.
            program: what runs.
            timeline: of the program, in seconds.
            costs: of the model on its stages.
            replicas: of the pipeline; if they share the optimizer, its step is in the program.
        """
        updates = self._updates([own.count for own in costs.memories], replicas)
        return Forecast.of(
            timeline,
            peaks(program, costs.memories),
            model_flops=self.flops(program.plan.microbatches),
            peak_flops=self._cluster(request.ranks).rates.peak_flops,
            step=0.0 if replicas is not None and replicas.sharded else max(updates),
        )

    def _balanced(self, gpt: DenseGpt, one: Plan) -> tuple[int, ...]:
        """Return the layers of every stage by which the slowest rank is as fast as possible."""
        cluster = self._cluster(one.ranks)
        empty = costs_of(dense_counts(gpt, one, [0] * len(one.stages)), one, cluster)
        parts = [layer_counts(gpt, one, number).passes for number in range(one.slices)]
        kinds = parts[0]
        layer = sum(cluster.seconds(work) for part in parts for work in part.values())
        extras = [sum(empty.time(kind, *stage) for kind in kinds) for stage in one.stages]
        return tuple(redistribute_stages(self.layers, one.stages, layer, extras))

    def _updates(self, counts: Sequence[RankCount], replicas: ReplicaJob | None) -> list[float]:
        """Return the seconds of the optimizer's step on every rank."""
        moved = STEP_BYTES / _parts(replicas)
        rates = self.device.rates
        return [rates.traffic(moved * count.parameters.all) for count in counts]

    def _cluster(self, ranks: int) -> Cluster:
        """Return the GPUs and their links: a pipeline fills machines, replicas are in others."""
        crossed = ranks > self.machine
        together = ranks % self.machine or self.machine if crossed else ranks
        return Cluster(self.device.rates, self.device.links(), {"column": together, "data": 1})

    def _memories(self, counts: Sequence[RankCount], parts: int) -> list[RankMemory]:
        parameter = WEIGHT_BYTES + GRADIENT_BYTES + STATE_BYTES / parts
        workspaces = self.device.workspaces
        return [
            RankMemory(count, parameter * count.parameters.all, workspaces=workspaces)
            for count in counts
        ]

    def _crossing(self, ranks: int) -> frozenset[tuple[int, int]]:
        pairs = combinations(range(ranks), 2)
        return frozenset((a, b) for a, b in pairs if a // self.machine != b // self.machine)


def _parts(replicas: ReplicaJob | None) -> int:
    """Return how many ranks share the optimizer's state of a parameter."""
    return 1 if replicas is None else replicas.exchanged.optimizer_parts


def _gpt(layers: int, hidden: int, heads: int) -> ModelJob:
    return ModelJob(layers=layers, hidden=hidden, heads=heads, groups=heads, ffn=4 * hidden)


def _llama(layers: int, hidden: int, heads: int, ffn: int) -> ModelJob:
    return ModelJob(
        kind="llama", layers=layers, hidden=hidden, heads=heads, groups=8, ffn=ffn, seq=8192,
        vocabulary=128256,
    )  # fmt: skip


MODELS: Final[Mapping[str, ModelJob]] = {
    "GPT, 32 layers of 3072": _gpt(32, 3072, 24),
    "GPT, 48 layers of 4096": _gpt(48, 4096, 32),
    "GPT, 64 layers of 5120": _gpt(64, 5120, 40),
    "Llama 3 8B": _llama(32, 4096, 32, 14336),
    "Llama 3 70B": _llama(80, 8192, 64, 28672),
}
"""Models to begin with: those of arXiv 2411.05288 (section 6) with its largest vocabulary, 256,000
entries, and Meta's published sizes."""
