"""From a configuration to a rank that can train: device, groups, plan, model, optimizer."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.model.stage import WORD_EMBEDDINGS, RankModel, place
from megatron.optimizer.adamw import MixedPrecisionAdamW
from megatron.optimizer.main_gradients import MainGradients
from megatron.optimizer.parameters import OptimizedParameter, wants_weight_decay
from megatron.parallel.groups import PipelineGroups, make_groups
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
        device_id = device if config.backend == "nccl" else None
        dist.init_process_group(config.backend, timeout=timeout, device_id=device_id)
        return make_groups(device, timeout)
    return PipelineGroups(0, 1, device)


def make_model(config: RunConfig, groups: PipelineGroups) -> RankModel:
    """Build this rank's part of the model with its initial weights."""
    parallel, train = config.parallel, config.train
    placement = place(
        config.model,
        make_run_plan(config).stages,
        groups.rank,
        padded_vocab_size=parallel.padded_vocab_size,
        split_vocabulary=parallel.vocab_parallel != "none",
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


def make_pipeline(config: RunConfig, groups: PipelineGroups, model: RankModel) -> PipelineRank:
    """Return what runs the plan of ``config`` on this rank's ``model``."""
    train = config.train
    return PipelineRank(
        model,
        make_run_plan(config),
        groups,
        (train.micro_batch_size, config.model.seq_length, config.model.hidden_size),
        train.dtype,
        train.seed,
        pass_costs(config.model, config.parallel, train.micro_batch_size),
    )


def build_trainer(config: RunConfig, groups: PipelineGroups) -> Trainer:
    """Build this rank's model with its initial weights, and what trains it."""
    model = make_model(config, groups)
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
        pipeline=make_pipeline(config, groups, model),
        parameters=parameters,
        gradients=gradients,
        optimizer=MixedPrecisionAdamW(parameters, config.optimizer),
    )
