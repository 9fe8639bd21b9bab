"""One benchmark case: a model, data, a schedule and a treatment of the vocabulary."""

import json
from dataclasses import asdict, dataclass
from typing import Final, Literal

import torch

from megatron.data.microbatch import Microbatch
from megatron.data.settings import DataSettings
from megatron.data.shares import Split
from megatron.model.distribution import LayerDistribution
from megatron.model.settings import ModelSettings
from megatron.optimizer.settings import OptimizerSettings
from megatron.parallel.settings import (
    DeviceSettings,
    PipelineRankSettings,
    ReplicaSettings,
    TensorRankSettings,
)
from megatron.run.log import LogSettings
from megatron.run.parallel_config import ParallelConfig
from megatron.run.precision import PrecisionSettings
from megatron.run.run_config import RunConfig
from megatron.run.train import TrainSettings
from megatron.schedules.settings import PlanSettings, ScheduleSettings, SliceSettings
from megatron.schedules.treatment_settings import TreatmentSettings
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.settings import ClusterSettings

REFERENCES: Final = ("single", "pytorch-1f1b", "pytorch-zbv", "pytorch-ddp", "pytorch-tp")
"""Names that stand in place of a schedule for what is compared with: see ``references``."""

BASE: Final = ("1f1b", "none")
"""Schedule and treatment that every case is compared with."""

UPDATING: Final = ("single", "pytorch-ddp", "pytorch-tp")
"""References whose update of the weights can be measured too."""

SEED: Final = 1234


@dataclass(frozen=True)
class BenchmarkCase:
    """One thing to measure: a schedule of this project, or a reference.

    Attributes:
        vocab_size: V, also the padded size where the shards allow it.
        schedule: of ours, or one of ``REFERENCES``, which know no treatment but ``none``.
        treatment: of the vocabulary.
        ranks: pipeline ranks p; of a reference all its ranks.
        microbatches: microbatches m of one sample each, of all replicas together.
        hidden_size: h.
        layers: transformer layers.
        heads: attention heads.
        seq_length: tokens s of a sample.
        dtype: of parameters and activations.
        device: kind of device.
        memory_limit: the most microbatches that a rank may have in flight; ``None``: no limit.
        tensor: ranks t that share a layer, and the sequence outside of attention and MLP.
        replicas: of the pipeline, d. They share the optimizer's state, and overlap what they can.
        slices: n of every microbatch.
        with_update: whether a reference also updates its weights, if it can.
    """

    vocab_size: int
    schedule: str
    treatment: str
    ranks: int
    microbatches: int
    hidden_size: int
    layers: int
    heads: int
    seq_length: int
    dtype: str
    device: Literal["cpu", "cuda"]
    memory_limit: float | None = None
    tensor: int = 1
    replicas: int = 1
    with_update: bool = False
    slices: int = 1

    @property
    def name(self) -> str:
        """Short name of the case within a report."""
        name = f"{self.vocab_size} {self.schedule} {self.treatment}"
        name += f" t={self.tensor}" if self.tensor > 1 else ""
        name += f" n={self.slices}" if self.slices > 1 else ""
        return name if self.replicas == 1 else f"{name} d={self.replicas}"

    @property
    def processes(self) -> int:
        """Number of ranks of the job."""
        return self.tensor * self.ranks * self.replicas

    @property
    def layout(self) -> str:
        """The axes of ranks and the slices in words; empty for references."""
        sizes = {"t": self.tensor, "p": self.ranks, "d": self.replicas, "n": self.slices}
        several = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
        return "" if self.is_reference else ",".join(several or ["p=1"])

    @property
    def is_reference(self) -> bool:
        """Whether the case measures a reference, and not this framework."""
        return self.schedule in REFERENCES

    @property
    def torch_dtype(self) -> torch.dtype:
        """The ``dtype`` of torch."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def to_json(self) -> str:
        """Return the case as text for a worker's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "BenchmarkCase":
        """Read what ``to_json`` wrote."""
        return cls(**json.loads(text))

    def model_config(self) -> ModelSettings:
        """Return the model: GPT-2's shape, untied, no dropout."""
        return ModelSettings.of(
            num_layers=self.layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=4 * self.hidden_size,
            num_attention_heads=self.heads,
            num_query_groups=self.heads,
            kv_channels=self.hidden_size // self.heads,
            seq_length=self.seq_length,
            max_position_embeddings=self.seq_length,
            vocab_size=self.vocab_size,
            tie_embeddings=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
        )

    def run_config(self) -> RunConfig:
        """Return the case as the configuration of a run of ours."""
        treatment = TREATMENTS[self.treatment]
        multiple = 128 * self.tensor * (self.ranks if treatment.is_sharded else 1)
        parallel = ParallelConfig(
            pipeline=PipelineRankSettings(self.ranks),
            tensor=TensorRankSettings(self.tensor, self.tensor > 1),
            treatment=TreatmentSettings(self.treatment),
            slices=SliceSettings(self.slices),
            schedule=ScheduleSettings(self.schedule),
            padded_vocab_size=-(-self.vocab_size // multiple) * multiple,
            devices=DeviceSettings(self.device, "nccl" if self.device == "cuda" else "gloo"),
            cluster=ClusterSettings(no_numa_binding=True),  # as in all reports before
            planning=PlanSettings(zero_bubble_max_pending_backward=self.memory_limit),
            layers=LayerDistribution("redis" if treatment.redistributed else "even"),
            replicas=self._replica_config(),
        )
        train = TrainSettings(
            micro_batch_size=1,
            global_batch_size=self.microbatches,
            train_iters=2,
            exit_interval=None,
            seed=SEED,
            precision=PrecisionSettings(self.dtype == "bfloat16", self.dtype == "float16"),
            eval_interval=None,
            eval_iters=1,
            replicas=self.replicas,
        )
        log = LogSettings(log_interval=1)
        data = DataSettings(split=Split(1, 0, 0), seq_length=self.seq_length, seed=SEED)
        return RunConfig(
            self.model_config(), parallel, train, OptimizerSettings(lr=1e-4), data, log
        )

    def _replica_config(self) -> ReplicaSettings:
        if self.replicas == 1:
            return ReplicaSettings()
        return ReplicaSettings(
            size=self.replicas, overlap=True, shard_optimizer=True, overlap_gather=True
        )

    def batch(self) -> list[Microbatch]:
        """Return the microbatches: random tokens, the same for every case with this V."""
        return [self._microbatch(index) for index in range(self.microbatches)]

    def _microbatch(self, index: int) -> Microbatch:
        generator = torch.Generator().manual_seed(index)
        shape = (1, self.seq_length + 1)
        return microbatch_of(torch.randint(self.vocab_size, shape, generator=generator))


def microbatch_of(tokens: torch.Tensor) -> Microbatch:
    """Return the microbatch of samples [b, s + 1]: each token is to predict the one after it."""
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return Microbatch(inputs, labels, torch.ones(inputs.shape))
