"""A job in two tongues: as a configuration of the framework and as one run of the plain reference.

Everything that decides the numbers is in `Job`; a `Layout` must not change them.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from harness.precisions import precision
from reference.plain_gpt import GPTOptions, Parameters
from reference.plain_loss import RandomMicrobatch
from reference.plain_training import AdamWOptions, Training, train

from megatron.checkpoint.saved_model import read_model
from megatron.data.settings import DataSettings
from megatron.data.shares import Split
from megatron.layers.recompute import NO_RECOMPUTATION, Recomputation
from megatron.layers.vocabulary.settings import ShardSettings
from megatron.model.distribution import LayerDistribution
from megatron.optimizer.settings import OptimizerSettings
from megatron.parallel.context import ContextExchange
from megatron.parallel.context_settings import ContextRankSettings
from megatron.parallel.grid import Order
from megatron.parallel.settings import (
    DeviceSettings,
    Dispatcher,
    ExpertRankSettings,
    PipelineRankSettings,
    ReplicaSettings,
    TensorRankSettings,
)
from megatron.run.log import LogSettings
from megatron.run.parallel_config import ParallelConfig
from megatron.run.pipeline_layout import LAYOUT_FLAG, parse_layout
from megatron.run.run_config import RunConfig
from megatron.run.train import TrainSettings
from megatron.schedules.block_options import BlockOptions
from megatron.schedules.settings import (
    OffloadSettings,
    PlanSettings,
    ScheduleSettings,
    SliceSettings,
)
from megatron.schedules.treatment_settings import TreatmentSettings
from megatron.schedules.treatments import TREATMENTS

ROWS_MULTIPLE = 4
"""Rows of a vocabulary shard are a multiple of this, so that there is padding to go wrong."""

EIGHT_LAYER_GPT = GPTOptions(num_layers=8, vocab_size=37)
EIGHT_LAYER_LLAMA = GPTOptions(
    num_layers=8,
    vocab_size=37,
    tie_embeddings=False,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
)
"""Models that four ranks of two chunks can share."""


@dataclass(frozen=True)
class Layout:
    """How a job is spread.

    Attributes:
        ranks: pipeline ranks p.
        vocabulary: treatment of the vocabulary layers.
        schedule: that makes the plan.
        file: of the plan, for the schedule ``file``.
        memory_limit: microbatches, for ``zb-auto``.
        replicas: of the pipeline, d.
        overlap: reduce gradients while passes are left.
        bucket_size: parameters of a bucket.
        sharded: the optimizer's state over the replicas.
        tensor: ranks t that share a layer.
        sequence: whether each of them has its own part of the sequence.
        vocab_recompute: T forms the logits again.
        recomputation: what the backward of the layers computes again.
        recompute_ahead: in passes of their own, so many chunks ahead of their B.
        context: ranks c that share every sequence.
        exchange: how their attention sees all tokens.
        neighbours: of them, ranks that exchange heads in two levels.
        experts: ranks e over which experts are spread.
        expert_tensor: ranks etp that share an expert; ``None``: t.
        dispatcher: how tokens come to experts on other ranks.
        order: of the ranks.
        slices: n into which every microbatch is cut along its sequence.
        offloaded: chunks of a rank whose activations wait on the host.
        group: microbatches that go through a chunk before any enters the next; ``None``: p.
        first: layers of the first stage; ``None``: as the treatment spreads them.
        stages: in Megatron-Core's form, with the stage of further tokens; empty: as ``first`` says.
    """

    ranks: int
    vocabulary: str
    schedule: str = "1f1b"
    file: Path | None = None
    memory_limit: float | None = None
    replicas: int = 1
    overlap: bool = False
    bucket_size: int | None = None
    sharded: bool = False
    tensor: int = 1
    sequence: bool = False
    vocab_recompute: bool = False
    recomputation: Recomputation = NO_RECOMPUTATION
    recompute_ahead: int | None = None
    context: int = 1
    exchange: ContextExchange = "all_gather"
    neighbours: int = 1
    experts: int = 1
    expert_tensor: int | None = None
    dispatcher: Dispatcher = "allgather"
    order: Order = "tp-dp-pp"
    slices: int = 1
    offloaded: int | None = None
    group: int | None = None
    first: int | None = None
    stages: str = ""

    def __str__(self) -> str:
        schedule = "" if self.schedule == "1f1b" else f"-{self.schedule}"
        replicas = "" if self.replicas == 1 else f"d{self.replicas}-"
        tensor = "" if self.tensor == 1 else f"t{self.tensor}{'s' * self.sequence}-"
        tensor += "" if self.context == 1 else f"c{self.context}-"
        tensor += "" if self.exchange == "all_gather" else f"{self.exchange}-"
        tensor += "" if self.experts == 1 else f"e{self.experts}-{self.dispatcher}-"
        tensor += "" if self.expert_tensor is None else f"etp{self.expert_tensor}-"
        tensor += "" if self.slices == 1 else f"n{self.slices}-"
        tensor += "" if self.order == "tp-dp-pp" else f"{self.order}-"
        options = "-overlap" * self.overlap + "-sharded" * self.sharded
        options += "-again" * (self.recomputation != NO_RECOMPUTATION)
        options += "-recomputed" * self.vocab_recompute
        options += f"-ahead{self.recompute_ahead}" * (self.recompute_ahead is not None)
        options += "" if self.offloaded is None else f"-host{self.offloaded}"
        options += "" if self.group is None else f"-groups{self.group}"
        options += "" if self.first is None else f"-first{self.first}"
        options += f"-{self.stages.replace('|', '.')}" if self.stages else ""
        return f"{tensor}{replicas}p{self.ranks}-{self.vocabulary}{schedule}{options}"

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.tensor * self.context * self.replicas * self.ranks

    @property
    def levels(self) -> tuple[int, ...]:
        """Ranks that exchange heads, and sets of them, which make a ring; one level: empty."""
        near = self.neighbours
        return () if near == 1 else (near, self.context // near)

    @property
    def distribution(self) -> LayerDistribution:
        """The layers of the stages."""
        if self.stages:
            read = parse_layout(self.stages)
            return LayerDistribution(
                "explicit",
                counts=read.layers,
                written=f"{LAYOUT_FLAG} {self.stages}",
                further_stage=read.further_stage,
            )
        if self.first is not None:
            return LayerDistribution("even", first=self.first)
        redistributed = TREATMENTS[self.vocabulary].redistributed
        return LayerDistribution("redis" if redistributed else "remainder")

    @property
    def vocab_shards(self) -> int:
        """Parts of the vocabulary."""
        return self.tensor * (self.ranks if TREATMENTS[self.vocabulary].is_sharded else 1)


LAYOUTS = [Layout(p, v) for p in (1, 2, 4) for v in ("none", "vocab-1", "vocab-2")]


@dataclass(frozen=True)
class Job:
    """What to train, on what, how long.

    Attributes:
        options: the model.
        micro_batch_size: samples b per microbatch.
        microbatches: m.
        masked_out: microbatches of which no loss counts.
        iterations: of training.
        sequence: tokens per sample.
        documents: samples are of documents that do not see each other.
        dropout: of attention and of the hidden states; the reference has none.
        adamw: the optimizer; clipping is meant to be at work.
        lr: peak learning rate, reached by a warm-up and left along a cosine.
        warmup: iterations of warm-up.
        init_method_std: large enough that the logits differ.
    """

    options: GPTOptions
    micro_batch_size: int = 1
    microbatches: int = 5
    masked_out: tuple[int, ...] = ()
    iterations: int = 8
    sequence: int = 10
    documents: bool = False
    dropout: float = 0.0
    adamw: AdamWOptions = dataclasses.field(
        default_factory=lambda: AdamWOptions(adam_eps=1e-6, clip_grad=0.5, weight_decay=0.1)
    )
    lr: float = 3e-3
    warmup: int = 3
    init_method_std: float = 0.15

    def batches(self, seed: int = 0) -> list[list[RandomMicrobatch]]:
        """The microbatches of every iteration."""
        return [
            [
                RandomMicrobatch.draw(
                    self.options.vocab_size,
                    self.micro_batch_size,
                    self.sequence,
                    seed=(seed * 100 + iteration) * 100 + microbatch,
                    masked_out=microbatch in self.masked_out,
                    documents=self.documents,
                )
                for microbatch in range(self.microbatches)
            ]
            for iteration in range(self.iterations)
        ]

    @property
    def evaluated(self) -> list[RandomMicrobatch]:
        """The microbatches of an evaluation, whose tokens all have the same weight."""
        return [microbatch for batch in self.batches(seed=1)[:2] for microbatch in batch]

    def learning_rates(self) -> list[float]:
        """Of every iteration: linear from 0 to the peak, then half a cosine to a tenth of it.

        Without warm-up the first iteration has the peak.
        """
        rates = []
        for iteration in range(self.iterations):
            if self.warmup and iteration <= self.warmup:
                rates.append(self.lr * iteration / self.warmup)
                continue
            turn = math.pi * (iteration - self.warmup) / (self.iterations - self.warmup)
            rates.append(self.lr * (0.1 + 0.9 * (1 + math.cos(turn)) / 2))
        return rates

    def reference(self, parameters: Parameters) -> Training:
        """What the plain GPT makes of it, from these parameters."""
        return train(parameters, self.batches(), self.learning_rates(), self.options, self.adamw)

    def config(self, layout: Layout, dtype: torch.dtype = torch.float32) -> RunConfig:
        """The framework's configuration for a layout."""
        multiple = ROWS_MULTIPLE * layout.vocab_shards
        global_batch_size = self.micro_batch_size * self.microbatches
        alike = layout.replicas * layout.context
        return RunConfig(
            model=read_model(
                dataclasses.asdict(self.options)
                | {
                    "seq_length": self.sequence,
                    "attention_dropout": self.dropout,
                    "hidden_dropout": self.dropout,
                    "init_method_std": self.init_method_std,
                }
            ),
            parallel=ParallelConfig(
                pipeline=PipelineRankSettings(layout.ranks),
                tensor=TensorRankSettings(layout.tensor, layout.sequence),
                context=ContextRankSettings(layout.context, layout.exchange, layout.levels),
                vocabulary=ShardSettings(layout.vocab_recompute),
                slices=SliceSettings(layout.slices),
                treatment=TreatmentSettings(layout.vocabulary),
                schedule=ScheduleSettings(layout.schedule),
                padded_vocab_size=math.ceil(self.options.vocab_size / multiple) * multiple,
                devices=DeviceSettings("cpu", "gloo", 1),
                planning=PlanSettings(
                    schedule_file=layout.file,
                    zero_bubble_max_pending_backward=layout.memory_limit,
                ),
                block_options=BlockOptions.of(group=layout.group),
                recompute_ahead=layout.recompute_ahead,
                offload=OffloadSettings(layout.offloaded is not None, layout.offloaded),
                layers=layout.distribution,
                experts=ExpertRankSettings(layout.experts, layout.expert_tensor, layout.dispatcher),
                replicas=ReplicaSettings(
                    size=alike,
                    overlap=layout.overlap,
                    ddp_bucket_size=layout.bucket_size,
                    shard_optimizer=layout.sharded and alike > 1,
                    overlap_gather=layout.sharded and layout.overlap and alike > 1,
                    order=layout.order,
                ),
            ),
            train=TrainSettings(
                micro_batch_size=self.micro_batch_size,
                global_batch_size=global_batch_size,
                train_iters=self.iterations,
                exit_interval=None,
                seed=1234,
                precision=precision(dtype),
                eval_interval=1,
                eval_iters=2,
                replicas=layout.replicas,
                recomputation=layout.recomputation,
            ),
            optimizer=OptimizerSettings(
                lr=self.lr,
                min_lr=self.lr / 10,
                lr_decay_style="cosine",
                lr_decay_samples=self.iterations * global_batch_size,
                lr_warmup_samples=self.warmup * global_batch_size,
                **dataclasses.asdict(self.adamw),
            ),
            data=DataSettings(split=Split(1, 0, 0), seq_length=self.sequence, seed=0),
            log=LogSettings(log_interval=1, moe_per_layer_logging=True),
        )
