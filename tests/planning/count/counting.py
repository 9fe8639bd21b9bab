"""Small runs whose work is counted."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from harness.precisions import precision
from harness.small_models import GPT, llama_of

from megatron.data.settings import DataSettings
from megatron.data.shares import Split
from megatron.model.settings import ModelSettings
from megatron.optimizer.settings import OptimizerSettings
from megatron.parallel.settings import DeviceSettings, PipelineRankSettings, ReplicaSettings
from megatron.planning.count.run import count_ranks
from megatron.run.log import LogSettings
from megatron.run.parallel_config import ParallelConfig
from megatron.run.run_config import RunConfig
from megatron.run.train import TrainSettings
from megatron.schedules.make_plan import make_plan
from megatron.schedules.plan import Plan
from megatron.schedules.settings import ScheduleSettings
from megatron.schedules.treatment_settings import TreatmentSettings
from megatron.simulator.costs.count import RankCount

MODEL: Final = GPT.replaced(
    num_layers=8,
    vocab_size=960,  # divides by all numbers of shards, so no row is padding
    hidden_dropout=0.0,
)
LLAMA: Final = llama_of(MODEL, kv_channels=24, ffn_hidden_size=96)
FURTHER: Final = LLAMA.replaced(mtp_num_layers=2)
"""A model that predicts two further tokens."""


def run_of(
    model: ModelSettings = MODEL,
    treatment: str = "none",
    ranks: int = 1,
    samples: int = 1,
    *,
    sizes: dict[str, Any] | None = None,
    optimizer: OptimizerSettings | None = None,
    **train: Any,
) -> RunConfig:
    """Return a run of one microbatch.

    Args:
        model: of the run.
        treatment: of the vocabulary.
        ranks: of the pipeline.
        samples: of a microbatch.
        sizes: further options of ``ParallelConfig``.
        optimizer: of the run.
        train: further options of ``TrainSettings``.
    """
    layout = dict(sizes or {})
    options: dict[str, Any] = {
        "micro_batch_size": samples,
        "global_batch_size": samples,
        "train_iters": 1,
        "exit_interval": None,
        "seed": 1,
        "precision": precision(torch.bfloat16),
        "eval_interval": None,
        "eval_iters": 0,
    }
    return RunConfig(
        model=model,
        parallel=ParallelConfig(
            pipeline=PipelineRankSettings(ranks),
            treatment=TreatmentSettings(treatment),
            schedule=ScheduleSettings("1f1b"),
            padded_vocab_size=model.vocab_size,
            devices=DeviceSettings("cuda", "nccl", 1),
            replicas=ReplicaSettings(size=layout["context"].size if "context" in layout else 1),
            **layout,
        ),
        train=TrainSettings(**(options | train)),
        optimizer=optimizer or OptimizerSettings(lr=1.0),
        data=DataSettings(split=Split(1, 0, 0), seq_length=model.seq_length, seed=0),
        log=LogSettings(log_interval=1),
    )


def plan_of(run: RunConfig, schedule: str = "1f1b", **options: Any) -> Plan:
    """Return a plan of one microbatch for a run."""
    parallel = run.parallel
    plan = make_plan(schedule, parallel.vocab_parallel, parallel.pipeline.size, 1, **options)
    return replace(plan, ahead_stage=run.ahead_stage(len(plan.stages)))


def counted(run: RunConfig, layers: Sequence[int], schedule: str = "1f1b") -> list[RankCount]:
    """Return the counts of all ranks of a run."""
    return count_ranks(run, plan_of(run, schedule), layers)


def flops_of(counts: Sequence[RankCount]) -> int:
    """Return the FLOPs of the passes of all ranks."""
    return sum(each.flops for count in counts for each in count.passes.values())
