"""Costs and sizes of a model on a kind of GPU, as ``pretrain_gpt.py --dry-run`` counts them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, NamedTuple

from megatron.schedules.costs import Costs
from megatron.schedules.lower import Program
from megatron.schedules.make_plan import one_microbatch_of, stages_of
from megatron.schedules.plan import Plan
from megatron.schedules.plan_file import load_any_plan
from megatron.schedules.request import Request
from megatron.schedules.treatments import Treatment
from megatron.simulator.costs.device import Device
from megatron.simulator.costs.from_model import ModelTimes
from megatron.simulator.costs.gpus import GPUS, Gpu, interconnect
from megatron.simulator.costs.machines import Machines
from megatron.simulator.costs.model_bytes import parameters
from megatron.simulator.costs.peak_bytes import Sizes
from megatron.simulator.costs.recomputed import NOTHING, Recomputed
from megatron.simulator.costs.replicas import ALONE
from megatron.simulator.costs.shape import Shape, iteration_flops
from megatron.simulator.costs.stage_costs import even_layers, stage_costs
from megatron.simulator.costs.training_bytes import (
    optimizer_traffic,
    own_logits,
    training_sizes,
)
from megatron.simulator.forecast import Forecast, forecast
from megatron.simulator.simulate import Timeline
from tools.explorer.replica_job import ReplicaJob

TILE_ROWS: Final = 16384
"""Vocabulary entries that the output layer's kernels work on at once, those of
``kernels/reference``, which knows PyTorch and is not to be imported here."""
EXPONENTIALS_AT_ONCE: Final = 1 << 22
"""Exponentials in fp32 at the same time, from there too."""


class ModelCosts(NamedTuple):
    """What a model costs on the stages of a plan.

    Attributes:
        costs: in seconds.
        sizes: in bytes.
        layers: transformer layers of every stage.
    """

    costs: Costs
    sizes: Sizes
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

    @property
    def shape(self) -> Shape:
        """The model and one microbatch, for counting."""
        h, width, gated = self.hidden, self.hidden // self.heads, self.kind == "llama"
        biases = (self.heads + 2 * self.groups) * width + self.ffn
        return Shape(
            hidden_size=h,
            num_attention_heads=self.heads,
            seq_length=self.seq,
            vocab_size=self.vocabulary,
            micro_batch_size=self.batch,
            ffn_hidden_size=self.ffn,
            query_width=h,
            key_value_width=2 * self.groups * width,
            gated_mlp=gated,
            vector_parameters=2 * h if gated else 6 * h,
            cut_vector_parameters=0 if gated else biases,
            own_queries=gated,
            dropout=False,
            depth_vector_parameters=3 * (h if gated else 2 * h),
            recomputed=Recomputed(group=1) if self.recompute else NOTHING,
        )

    @property
    def positions(self) -> int:
        """Positions that have an embedding of their own."""
        return self.seq if self.kind == "gpt" else 0

    def costs_of(self, request: Request, replicas: ReplicaJob | None = None) -> ModelCosts:
        """Return the costs and sizes on the stages of a plan; the plan itself is not made.

        Args:
            request: for the plan.
            replicas: of the pipeline; ``None``: there is one pipeline.

        Raises:
            ValueError: there are fewer layers than stages.
        """
        treatment, device = request.treatment, self._rates(request)
        stages = stages_of(request) if request.file is None else load_any_plan(request.file).stages
        if self.layers < len(stages):
            raise ValueError(
                f"{self.layers} layers are fewer than the {len(stages)} stages: give the model "
                "more layers, or the pipeline fewer ranks or chunks"
            )
        machines = self._machines(request)
        times = ModelTimes(self.shape, device, early_whole=True, machines=machines)
        found = stage_costs(times, stages, treatment)
        even = even_layers(self.layers, len(stages))
        layers = found.balanced(self.layers) if treatment.redistributed else even
        one = one_microbatch_of(request) if request.file is None else load_any_plan(request.file)
        sizes = training_sizes(
            self.shape,
            one,
            layers,
            treatment,
            own_logits(self.shape, request.ranks, TILE_ROWS, EXPONENTIALS_AT_ONCE),
            tied=False,
            positions=self.positions,
            post_validation=False,
            replicas=ALONE if replicas is None else replicas.exchanged,
        )
        costs = found.costs(layers)
        if replicas is not None:
            costs = replicas.added_to(
                costs,
                self.device,
                self._parameters(one, layers, treatment),
                self._updates(request, one, layers, replicas),
                len(replicas.even_buckets.of(one)[0]),
            )
        return ModelCosts(costs, sizes, tuple(layers))

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
        device, plan = self._rates(request), program.plan
        updates = self._updates(request, plan, costs.layers, replicas)
        return forecast(
            program,
            timeline,
            costs.sizes,
            model_flops=iteration_flops(self.shape, self.layers, plan.microbatches),
            peak_flops=device.peak_flops,
            step=0.0 if replicas is not None and replicas.sharded else max(updates),
        )

    def _parameters(self, plan: Plan, layers: Sequence[int], treatment: Treatment) -> list[float]:
        """Return the parameters of every rank."""
        counts = parameters(self.shape, plan.stages, layers, treatment)
        counts[plan.stages[0][0]] += self.positions * self.hidden
        return counts

    def _updates(
        self, request: Request, plan: Plan, layers: Sequence[int], replicas: ReplicaJob | None
    ) -> list[float]:
        """Return the seconds of the optimizer's step on every rank."""
        moved = optimizer_traffic(
            self.shape,
            plan,
            layers,
            request.treatment,
            tied=False,
            post_validation=False,
            replicas=ALONE if replicas is None else replicas.exchanged,
        )
        return list(map(self._rates(request).traffic, moved))

    def _machines(self, request: Request) -> Machines:
        pairs = combinations(range(request.ranks), 2)
        crossing = frozenset((a, b) for a, b in pairs if a // self.machine != b // self.machine)
        return Machines(interconnect(self.device, request.treatment).network, crossing)

    def _rates(self, request: Request) -> Device:
        return self.device.device(request.treatment)


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
