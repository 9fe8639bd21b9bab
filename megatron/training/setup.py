"""From a configuration and process groups to a rank that can train: model, pipeline, optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from megatron.kernels.cuda.grouped_packages import load_grouped_package
from megatron.kernels.face import Kernels
from megatron.layers.scales import DelayedScales
from megatron.layers.site import Site
from megatron.model.ownership import WORD_EMBEDDINGS, OwnedParameter
from megatron.model.placement import place
from megatron.model.stage import RankModel
from megatron.optimizer.bucket import Bucket
from megatron.optimizer.bucket_layouts import bucket_layouts
from megatron.optimizer.host_link import HostLink
from megatron.optimizer.loss_scaler import LossScaler
from megatron.optimizer.make import (
    keeps_whole,
    make_idle_optimizer,
    make_optimizer,
    make_with_host,
)
from megatron.optimizer.muon import qkv_rows
from megatron.optimizer.narrow_values import narrow_values
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.parameters import ParameterPart
from megatron.optimizer.sharded import MakeOptimizer, ShardedOptimizer
from megatron.parallel.collectives import MAXIMUM, all_reduce
from megatron.parallel.context import ContextAxes, context_parallel
from megatron.parallel.deep_ep import VisitedExperts, make_buffer
from megatron.parallel.environment import cores_of_rank
from megatron.parallel.experts import ExpertParallel, spread_experts
from megatron.parallel.groups import ConnectedAxis, Groups, with_turns
from megatron.parallel.lanes import make_lane
from megatron.parallel.tensor import tensor_parallel
from megatron.planning.planned_run import RunPlan
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.runtime.buckets import make_buckets
from megatron.runtime.pipeline import PipelineRank
from megatron.runtime.replayed import CudaSlot
from megatron.runtime.replication import Replication
from megatron.schedules.plan import Plan
from megatron.training.expert_biases import ExpertBiases
from megatron.training.layer_figures import LayerFigures
from megatron.training.own_tokens import slices_of


@dataclass
class OwnSums:
    """This rank's part of the last iteration's sums (``own_totals``); ``None`` before the first."""

    latest: torch.Tensor | None = None


@dataclass(frozen=True)
class TrainState:
    """Everything that one rank trains with.

    Attributes:
        groups: this rank's view of the job.
        run_plan: the plan with which the run begins, and the assumptions behind it.
        pipeline: runs the plan of a training iteration.
        parameters: this rank's parameters.
        buckets: the parameters with their gradients, in buckets.
        counted: the parts whose gradients this rank adds to the global norm. With several replicas,
            each replica adds only its own shards, because the gradients are reduced by then.
        updated: the parts that this rank's optimizer updates and that checkpoints keep.
        optimizer: takes steps on the parts in ``updated``.
        loss_scaler: keeps the loss scale, and changes it after every iteration.
        layer_figures: the figures of layers in every iteration.
        expert_biases: the biases by which experts of this rank's layers are chosen.
        sharded: the optimizer, if it is sharded and its steps are taken bucket by bucket in the
            next iteration.
        host_link: the way to the states of the optimizer that are on the host, if any are.
        own_sums: sums of the last iteration before they were summed over ranks.
    """

    groups: Groups
    run_plan: RunPlan
    pipeline: PipelineRank
    parameters: tuple[OwnedParameter, ...]
    buckets: tuple[Bucket, ...]
    counted: tuple[ParameterPart, ...]
    updated: tuple[ParameterPart, ...]
    optimizer: Optimizer
    loss_scaler: LossScaler
    layer_figures: LayerFigures
    expert_biases: ExpertBiases
    sharded: ShardedOptimizer | None = None
    host_link: HostLink | None = None
    own_sums: OwnSums = field(default_factory=OwnSums)

    def close(self) -> None:
        """Release all lanes, after the last pass and the last step."""
        self.pipeline.close()
        if self.host_link is not None:
            self.host_link.close()

    @property
    def plan(self) -> Plan:
        """The plan of a training iteration."""
        return self.pipeline.train_program.plan

    @property
    def kernels(self) -> Kernels:
        """The kernels for the device and for the type of activations."""
        return self.pipeline.model.kernels

    def zero_gradients(self) -> None:
        """Start new sums: once per iteration, after the optimizer's step.

        Nothing is written yet: the gradients of the first microbatch overwrite the old sums.
        """
        for bucket in self.buckets:
            bucket.forget_gradients()

    @property
    def delayed_scales(self) -> DelayedScales | None:
        """The history of delayed scaling in 8 bits; ``None`` if it is not used."""
        eight_bits = self.pipeline.model.eight_bits
        return None if eight_bits is None else eight_bits.delayed

    def agree_on_scales(self) -> None:
        """Let all ranks with parts or copies of a layer agree on its next scales in 8 bits.

        Every rank calls it after the last pass of an iteration.
        """
        eight_bits, groups = self.pipeline.model.eight_bits, self.groups
        if eight_bits is None:
            return

        def agree(largest: torch.Tensor) -> None:
            for axis in (groups.data, groups.tensor_sums):
                all_reduce(largest, MAXIMUM, axis)

        eight_bits.end(agree)
        if self.sharded is not None and eight_bits.delayed is not None:
            self.sharded.scales_changed()

    def complete_gradients(self) -> None:
        """End the sums: a gradient to which no microbatch has added is 0."""
        for bucket in self.buckets:
            bucket.complete_gradients()


def make_model(config: RunConfig, groups: Groups, run_plan: RunPlan) -> RankModel:
    """Build this rank's part of the model with its initial weights."""
    train, parallel, axis = config.train, config.parallel, groups.tensor
    package = train.grouped_package
    plan, vocabulary = run_plan.plan, groups.vocabulary
    placement = place(
        config.model,
        plan.stages,
        groups.pipeline.rank,
        layers=run_plan.layers,
        padded_vocab_size=parallel.padded_vocab_size,
        vocabulary_shard=(
            (vocabulary.rank, vocabulary.size) if plan.treatment.is_sharded else None
        ),
        tensor_shard=(axis.rank, axis.size),
        ahead_stage=plan.ahead_stage,
    )
    tensor = tensor_parallel(
        axis, groups.device, sequence_parallel=parallel.tensor.sequence_parallel
    )
    site = Site(
        groups.device,
        train.dtype,
        tensor=tensor,
        context=context_parallel(
            ContextAxes(groups.context, groups.context_heads, groups.context_ring),
            parallel.context.exchange,
            lambda size: make_lane(groups.device, size, "context"),
        ),
        given_experts=_spread_experts(config, groups),
        data=groups.data,
        recomputation=train.recomputation,
        wide_stream=train.wide_stream,
        eight_bits=train.eight_bits,
        grouped_package=load_grouped_package(package) if package is not None else None,
    )
    model = RankModel(
        config.model, placement, site, vocab_recompute=parallel.vocabulary.vocab_recompute
    )
    model.initialise(train.seed, on_cpu=train.use_cpu_initialization)
    return model


def _spread_experts(config: RunConfig, groups: Groups) -> ExpertParallel | None:
    """Return how tokens travel to experts; ``None``: experts are with their layer."""
    if not groups.grid.spreads_experts:
        return None
    parallel, experts, gradients = config.parallel, groups.experts, groups.expert_gradients
    if parallel.experts.visits:
        buffer = make_buffer(experts, config.model.hidden_size, parallel.experts.moe_deepep_num_sms)
        return VisitedExperts(experts, gradients, buffer)
    return spread_experts(
        experts, groups.expert_tensor, gradients, parallel.experts.moe_token_dispatcher_type
    )


def _pipeline(
    config: RunConfig,
    groups: Groups,
    run_plan: RunPlan,
    model: RankModel,
    replication: Replication,
) -> PipelineRank:
    train = config.train
    tokens = config.model.seq_length // (model.context.size * model.tensor.sequence_parts)
    return PipelineRank(
        model,
        run_plan.plan,
        groups,
        (train.micro_batch_size, tokens, config.model.hidden_size),
        train.dtype,
        train.seed,
        run_plan.costs,
        replication,
        CudaSlot if train.captures_passes else None,
        slices_of(config),
    )


def build_train_state(
    config: RunConfig, groups: Groups, run_plan: RunPlan | None = None
) -> TrainState:
    """Build this rank's model with its initial weights, its pipeline and its optimizer.

    ``run_plan`` is the result of ``make_run_plan(config)``, if it exists already; the same on every
    rank.
    """
    run_plan = make_run_plan(config) if run_plan is None else run_plan
    pairs = config.parallel.pairs
    if pairs.joins:
        groups = with_turns(groups, pairs.axes)
    model = make_model(config, groups, run_plan)
    parameters = tuple(model.owned_parameters())
    axis = groups.gradients
    buckets = _buckets(config, model, run_plan.plan, axis)
    whole = tuple(map(ParameterPart.whole, parameters))
    own = tuple(part for bucket in buckets for part in bucket.parts(bucket.summed_over(axis).rank))
    alone = all(bucket.summed_over(axis).size == 1 for bucket in buckets)
    updated = own if config.parallel.replicas.shard_optimizer else whole
    link = _host_link(config, groups, updated)
    make = _maker_of_optimizers(config, groups, model.kernels, link)
    sharded = None
    if config.parallel.replicas.shard_optimizer:
        sharded = ShardedOptimizer(buckets, make, axis)
    deferred = sharded is not None and not config.optimizer.post_validation
    replicas = config.parallel.replicas
    replication = Replication(
        buckets,
        overlap_reduce=replicas.overlap,
        dtype=replicas.reduce_dtype,
        optimizer=sharded,
        deferred=deferred,
        overlap_gather=replicas.overlap_gather,
        gathers_eight_bits=replicas.gathers_eight_bits,
    )
    return TrainState(
        groups=groups,
        run_plan=run_plan,
        pipeline=_pipeline(config, groups, run_plan, model, replication),
        parameters=parameters,
        buckets=buckets,
        counted=whole if alone else own,
        updated=updated,
        optimizer=sharded or make(whole),
        loss_scaler=LossScaler(config.optimizer.loss_scale),
        layer_figures=LayerFigures.of(
            model,
            groups,
            config.model.experts.num_experts if config.log.moe_per_layer_logging else 0,
        ),
        expert_biases=ExpertBiases(model),
        sharded=sharded if deferred else None,
        host_link=link,
    )


def _buckets(
    config: RunConfig, model: RankModel, plan: Plan, axis: ConnectedAxis
) -> tuple[Bucket, ...]:
    """Put this rank's gradients into buckets, which the ranks of ``axis`` reduce together."""
    replicas, whole_ones = config.parallel.replicas, keeps_whole(config.optimizer)
    narrow = model.gathered_weights() if replicas.gathers_eight_bits else {}
    owned = make_buckets(
        model,
        plan,
        axis.size,
        replicas.ddp_bucket_size,
        replicas.ddp_num_buckets,
        whole_ones,
        narrow,
    )
    layouts = bucket_layouts(owned, axis.size, whole_ones)
    return tuple(
        Bucket(
            bucket,
            model.kernels,
            layout,
            together=replicas.shard_optimizer,
            given=narrow_values(bucket, layout, narrow, axis),
            gradient_dtype=config.train.gradient_dtype,
        )
        for bucket, layout in zip(owned, layouts, strict=True)
    )


def _host_link(
    config: RunConfig, groups: Groups, updated: Sequence[ParameterPart]
) -> HostLink | None:
    """Return the way to the states on the host; ``None``: the device has all, or nobody trains.

    ``updated`` are all parts that the rank updates.
    """
    if config.train.host_states is None or config.train.skip_train:
        return None
    if groups.device.type == "cuda":  # launchers give ranks one thread, as GPUs compute
        torch.set_num_threads(max(torch.get_num_threads(), cores_of_rank()))
    copied = frozenset((WORD_EMBEDDINGS,) if groups.ends.size > 1 else ())
    return HostLink(updated, config.train.host_states, groups.device, copied)


def _maker_of_optimizers(
    config: RunConfig, groups: Groups, kernels: Kernels, link: HostLink | None
) -> MakeOptimizer:
    """Return the function that makes the optimizer, or an idle one in a run without training."""
    if config.train.skip_train:
        return make_idle_optimizer
    qkv, tensor = qkv_rows(config.model), groups.tensor_sums
    if link is None:
        return partial(make_optimizer, config.optimizer, qkv, tensor, kernels)
    return partial(make_with_host, config.optimizer, qkv, tensor, kernels, link)
