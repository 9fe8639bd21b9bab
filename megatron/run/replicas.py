"""Replicas of the model: their number, their order, and rules about them.

The ranks of a job make as many replicas as they can.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from megatron.flags.groups import Flags, options_of, result_of
from megatron.flags.rules import notes, refuses
from megatron.layers.eight_bit_settings import GATHER, EightBitSettings
from megatron.optimizer.settings import OptimizerSettings
from megatron.parallel.context_settings import ContextRankSettings
from megatron.parallel.grid import ORDERS, Grid, Order
from megatron.parallel.placement import fewest_hops
from megatron.parallel.settings import PipelineRankSettings, ReplicaSettings, TensorRankSettings
from megatron.run.cluster import known_gpu, linked_ranks, ranks_of_machine
from megatron.run.dry_run import DryRunSettings
from megatron.run.expert_ranks import replicas_exchange
from megatron.run.parallelism import number_of_replicas, ranks_of_replica
from megatron.run.precision import NARROW_SUMS, PrecisionSettings
from megatron.run.train import TrainSettings, growth_of
from megatron.schedules.counted import counted


def replicas_of(given: Flags, replicas: int) -> ReplicaSettings:
    """Return the data parallelism of a run.

    Its flags change nothing if no two ranks have the same parameters.
    """
    alike, own = replicas * given[ContextRankSettings].size, given[ReplicaSettings]
    if alike == 1:
        return ReplicaSettings()
    return replace(
        own,
        size=alike,
        gathers_eight_bits=own.shard_optimizer and _asks_for_eight_bits(given),
        order=rank_order(given, replicas),
    )


def _asks_for_eight_bits(flags: Flags) -> bool:
    own = flags[EightBitSettings]
    return own.fp8_format is not None and own.fp8_param_gather


def rank_order(flags: Flags, replicas: int) -> Order:
    """Return the order of the ranks: by the flags, else with the fewest hops between machines.

    If replicas exchange tokens for experts, the ranks of replicas are neighbours by default: every
    layer exchanges tokens, but messages of the pipeline travel only between stages.
    """
    if flags[ReplicaSettings].order != ReplicaSettings.order:
        return flags[ReplicaSettings].order
    asked = flags[ReplicaSettings].rank_order
    if asked is None and replicas_exchange(flags):
        return ORDERS[0]
    grid = Grid(
        flags[TensorRankSettings].size,
        replicas,
        flags[PipelineRankSettings].size,
        context_size=flags[ContextRankSettings].size,
    )
    ranks = linked_ranks(grid.world_size, ranks_of_machine(flags), known_gpu(flags))
    return asked or fewest_hops(grid, ranks)


@notes
def _one_replica(flags: Flags) -> Iterator[str]:
    if number_of_replicas(flags) * flags[ContextRankSettings].size > 1:
        return
    more = " (--dry-run-replicas N plans more)" if flags[DryRunSettings].dry_run else ""
    for option, value in options_of(ReplicaSettings, flags[ReplicaSettings]):
        if value:
            yield f"{option} changes nothing: there is one replica of the model{more}"
    if _asks_for_eight_bits(flags):
        yield f"{GATHER} changes nothing: there is one replica of the model{more}"


@refuses
def _ranks(flags: Flags) -> Iterator[str]:
    """Judge the number of ranks of a job; for a dry run, the number that the job would have."""
    world_size, replicas = flags.world_size, flags[DryRunSettings].dry_run_replicas
    if flags[DryRunSettings].dry_run:
        least = ranks_of_replica(flags)
        world_size = least * replicas if replicas else max(least, world_size)
    yield from _ranks_of(world_size, flags)


def _ranks_of(world_size: int, flags: Flags) -> Iterator[str]:
    size, asked = ranks_of_replica(flags), _asked_for_a_replica(flags)
    if size > world_size:
        beside = flags[TensorRankSettings].size * flags[ContextRankSettings].size
        lower = world_size // beside
        lowered = f", or lower it to {lower}" if lower else ", or lower both"
        yield (
            f"{asked} is more than the {counted(world_size, 'rank')} of this job (WORLD_SIZE): "
            f"start {counted(size, 'rank')}{lowered}"
        )
    elif world_size % size:
        below = world_size // size * size
        yield (
            f"{asked} does not divide the {world_size} ranks of this job (WORLD_SIZE) into whole "
            f"replicas: start {below} or {below + size} ranks"
        )
    else:
        yield from _share_of_the_batch(world_size // size, flags)
        yield from _shares_of_growing_batches(world_size // size, flags)
        if world_size > size or flags[ContextRankSettings].size > 1:
            yield from _gathering(flags)


def _asked_for_a_replica(flags: Flags) -> str:
    """Return the flags that say how many ranks a replica has, and the number of ranks."""
    pipeline = f"--pipeline-model-parallel-size {flags[PipelineRankSettings].size}"
    others = [
        f"{flag} {size}"
        for flag, size in (
            ("--tensor-model-parallel-size", flags[TensorRankSettings].size),
            ("--context-parallel-size", flags[ContextRankSettings].size),
        )
        if size > 1
    ]
    if not others:
        return pipeline
    size = counted(ranks_of_replica(flags), "rank")
    return f"{' and '.join(others)} with {pipeline}, {size} of a replica,"


def _gathering(flags: Flags) -> Iterator[str]:
    overlaps = flags[ReplicaSettings].overlap_gather
    asked = {"--overlap-param-gather": overlaps, GATHER: _asks_for_eight_bits(flags)}
    for option, is_given in asked.items():
        if is_given and not flags[ReplicaSettings].shard_optimizer:
            yield (
                f"{option}: every replica updates all parameters, so that nothing is gathered: "
                "add --use-distributed-optimizer, or leave it out"
            )
    validates_later = flags[OptimizerSettings].post_validation
    if asked[GATHER] and validates_later and flags[EightBitSettings].fp8_recipe == "delayed":
        yield (
            f"{GATHER} with --fp8-recipe delayed does not go with "
            "--enable-optimizer-post-validation: scales change also if no step is taken, and then "
            "nothing is gathered; leave one of them out, or use --fp8-recipe tensorwise"
        )
    if overlaps and validates_later:
        yield (
            "--overlap-param-gather does not go with --enable-optimizer-post-validation: a step "
            "that may be undone is gathered at once; leave one of them out"
        )


def _share_of_the_batch(replicas: int, flags: Flags) -> Iterator[str]:
    batch, micro = flags[TrainSettings].global_batch_size, flags[TrainSettings].micro_batch_size
    if batch is None or replicas == 1 or batch % micro or not batch % (micro * replicas):
        return
    near = max(1, batch // (micro * replicas)) * micro * replicas
    yield (
        f"--global-batch-size {batch} does not split into microbatches of {micro} for {replicas} "
        f"replicas: use {near} or another multiple of {micro * replicas}"
    )


def _shares_of_growing_batches(replicas: int, flags: Flags) -> Iterator[str]:
    train = flags[TrainSettings]
    growth = result_of(partial(growth_of, train))
    unit = train.micro_batch_size * replicas
    if growth is not None and not growth.are_multiples(unit):
        given, sizes = (
            (f"--rampup-batch-size {' '.join(train.rampup_batch_size)}", "the first two numbers")
            if train.rampup_batch_size
            else (f"--batch-size-steps {' '.join(train.batch_size_steps)}", "all sizes")
        )
        yield (
            f"{given}: not every batch splits into microbatches of {train.micro_batch_size} for "
            f"{replicas} replicas: make {sizes} multiples of {unit}"
        )


@notes
def _wide_sums(flags: Flags) -> Iterator[str]:
    alone = number_of_replicas(flags) * flags[ContextRankSettings].size == 1
    wide = flags[PrecisionSettings].main_grads_dtype != "bf16"
    if flags[ReplicaSettings].grad_reduce_in_bf16 and wide and not alone:
        yield (
            "--grad-reduce-in-bf16 rounds the gradients that travel, and a rank adds up in fp32; "
            f"Megatron-LM adds up in bf16 too, as {NARROW_SUMS} does here"
        )
