"""From a configuration to a rank that can train: device, groups, plan, model, optimizer."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.model.stage import RankModel, place
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
        plan: the plan of a training iteration.
        pipeline: runs it.
        parameters: this rank's parameters as the optimizer sees them.
        gradients: their main gradients.
        optimizer: steps on them.
    """

    groups: PipelineGroups
    plan: Plan
    pipeline: PipelineRank
    parameters: tuple[OptimizedParameter, ...]
    gradients: MainGradients
    optimizer: MixedPrecisionAdamW


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


def build_trainer(config: RunConfig, groups: PipelineGroups) -> Trainer:
    """Build this rank's model with its initial weights, and what trains it."""
    parallel, train, model_config = config.parallel, config.train, config.model
    cost = pass_costs(model_config, parallel, train.micro_batch_size)
    plan = make_plan(
        parallel.pipeline_schedule,
        parallel.vocab_parallel,
        parallel.pipeline_size,
        train.num_microbatches,
        cost,
    )
    placement = place(
        model_config,
        plan.stages,
        groups.rank,
        padded_vocab_size=parallel.padded_vocab_size,
        split_vocabulary=parallel.vocab_parallel != "none",
    )
    model = RankModel(model_config, placement, train.dtype, groups.device)
    model.initialise(train.seed)
    parameters = tuple(
        OptimizedParameter(
            name,
            parameter,
            wants_weight_decay(name, parameter),
            counts_in_norm=not (model.holds_tied_copy and parameter is model.output_layer.weight),
        )
        for name, parameter in model.global_parameters()
    )
    gradients = MainGradients([p.parameter for p in parameters])
    shape = (train.micro_batch_size, model_config.seq_length, model_config.hidden_size)
    return Trainer(
        groups=groups,
        plan=plan,
        pipeline=PipelineRank(model, plan, groups, shape, train.dtype, train.seed, cost),
        parameters=parameters,
        gradients=gradients,
        optimizer=MixedPrecisionAdamW(parameters, config.optimizer),
    )
