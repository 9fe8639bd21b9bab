"""From a configuration to a rank that can train: device, groups, plan, model, optimizer."""

import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from megatron.model.stage import WORD_EMBEDDINGS, RankModel, place
from megatron.optimizer.adamw import MixedPrecisionAdamW
from megatron.optimizer.main_gradients import MainGradients
from megatron.optimizer.parameters import OptimizedParameter, wants_weight_decay
from megatron.parallel.groups import PipelineGroups, make_groups, single_rank
from megatron.runtime.pipeline import PipelineRank
from megatron.schedules.plan import Plan
from megatron.schedules.registry import make_plan
from megatron.training.config import ParallelConfig, RunConfig
from megatron.training.pass_costs import pass_costs


@dataclass(frozen=True)
class Trainer:
    """Everything that one rank trains with.

    Attributes:
        groups: the pipeline and its process groups.
        pipeline: runs the plan of a training iteration.
        parameters: this rank's parameters as the optimizer sees them.
        gradients: their main gradients.
        optimizer: steps on them.
    """

    groups: PipelineGroups
    pipeline: PipelineRank
    parameters: tuple[OptimizedParameter, ...]
    gradients: MainGradients
    optimizer: MixedPrecisionAdamW

    @property
    def plan(self) -> Plan:
        """The plan of a training iteration."""
        return self.pipeline.train_program.plan


def connect(config: ParallelConfig, local_rank: int) -> PipelineGroups:
    """Join the other ranks of the job, as torchrun's environment tells, and make the groups."""
    device = torch.device(config.device)
    timeout = timedelta(minutes=config.timeout_minutes)
    if config.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if config.pipeline_size > 1:
        # One communicator per group is made at once: a lazy one is made while others are in use.
        # The price: transfers of one direction that meet on a rank then run one after another.
        device_id = device if config.backend == "nccl" else None
        dist.init_process_group(config.backend, timeout=timeout, device_id=device_id)
        return make_groups(device, timeout)
    return single_rank(device)


def leave(groups: PipelineGroups) -> NoReturn:
    """End this process in good order, when every rank is done.

    Without the interpreter's own end: after it, destructors of PyTorch 2.13 abort about one process
    in fifteen ("terminate called without an active exception"), and torchrun would report a job
    that has succeeded as failed.
    """
    groups.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def make_model(config: RunConfig, groups: PipelineGroups, plan: Plan) -> RankModel:
    """Build this rank's part of the model with its initial weights."""
    parallel, train = config.parallel, config.train
    placement = place(
        config.model,
        plan.stages,
        groups.rank,
        padded_vocab_size=parallel.padded_vocab_size,
        split_vocabulary=plan.barriers is not None,
    )
    model = RankModel(config.model, placement, train.dtype, groups.device)
    model.initialise(train.seed)
    return model


def make_run_plan(config: RunConfig) -> Plan:
    """Return the plan of a training iteration, the same on every rank."""
    parallel, train = config.parallel, config.train
    return make_plan(
        parallel.pipeline_schedule,
        parallel.vocab_parallel,
        parallel.pipeline_size,
        train.num_microbatches,
        pass_costs(config.model, parallel, train.micro_batch_size),
    )


def make_pipeline(
    config: RunConfig, groups: PipelineGroups, plan: Plan, model: RankModel
) -> PipelineRank:
    """Return what runs ``plan`` on this rank's ``model``."""
    train = config.train
    return PipelineRank(
        model,
        plan,
        groups,
        (train.micro_batch_size, config.model.seq_length, config.model.hidden_size),
        train.dtype,
        train.seed,
        pass_costs(config.model, config.parallel, train.micro_batch_size),
    )


def build_trainer(config: RunConfig, groups: PipelineGroups) -> Trainer:
    """Build this rank's model with its initial weights, and what trains it."""
    plan = make_run_plan(config)
    model = make_model(config, groups, plan)
    parameters = tuple(
        OptimizedParameter(
            name,
            parameter,
            wants_weight_decay(name, parameter),
            counts_in_norm=not (model.holds_tied_copy and name == WORD_EMBEDDINGS),
        )
        for name, parameter in model.global_parameters()
    )
    gradients = MainGradients([p.parameter for p in parameters])
    return Trainer(
        groups=groups,
        pipeline=make_pipeline(config, groups, plan, model),
        parameters=parameters,
        gradients=gradients,
        optimizer=MixedPrecisionAdamW(parameters, config.optimizer),
    )
