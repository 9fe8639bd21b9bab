"""The memory of every rank of a run on GPUs, from the count of the code."""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import torch

from megatron.config.run_config import RunConfig
from megatron.optimizer.host_link import SLOTS, slot_elements
from megatron.parallel.communicators import communicators
from megatron.runtime.buckets import DEFAULT_BUCKET_SIZE, DEFAULT_PER_REPLICA
from megatron.runtime.communicator import ends_with_copies, links_of
from megatron.schedules.lower import lower
from megatron.schedules.plan import Plan, plan_of_one
from megatron.simulator.costs.count import Parameters, RankCount
from megatron.simulator.costs.gpus import Gpu
from megatron.simulator.costs.host_memory import pinned
from megatron.simulator.costs.rank_memory import RankMemory, peaks
from megatron.simulator.units import MEMORY
from megatron.training.planning.count.optimizer import count_step, count_step_on_host
from megatron.training.planning.count.run import count_ranks
from megatron.training.planning.planned_run import RunPlan
from megatron.training.planning.run_buckets import RankBuckets


class Fullest(NamedTuple):
    """The rank that holds the most.

    ``rank`` is its number in the pipeline; it holds ``peak`` bytes at most, ``static`` of them
    always. Its NCCL communicators take ``outside`` bytes beside these, by estimate.
    """

    rank: int
    peak: float
    static: float
    outside: float = 0.0

    @classmethod
    def of(cls, peaks: Sequence[float], memories: Sequence[RankMemory]) -> "Fullest":
        """Return the fullest of the ranks that hold ``peaks`` at most."""
        rank = max(range(len(peaks)), key=lambda own: peaks[own] + memories[own].outside)
        return cls(rank, peaks[rank], memories[rank].always, memories[rank].outside)

    def room(self, gpu: Gpu) -> float:
        """Return the bytes that tensors can use on the rank's GPU, beside its communicators."""
        return gpu.usable - self.outside

    def room_in_words(self, gpu: Gpu) -> str:
        """Return the bytes of ``room`` in words."""
        return f"tensors can use {MEMORY.write(self.room(gpu))} of {gpu.name}"

    def fits(self, gpu: Gpu) -> bool:
        """Return whether the rank's tensors fit a GPU; if so, all other ranks fit, too."""
        return self.peak <= self.room(gpu)


def fullest(config: RunConfig, run_plan: RunPlan) -> Fullest:
    """Return the fullest rank of a plan without replicas."""
    return Fullest.of(*held_by_ranks(config, run_plan))


def held_by_ranks(
    config: RunConfig, run_plan: RunPlan
) -> tuple[Sequence[float], Sequence[RankMemory]]:
    """Return the most bytes that each rank holds, and each rank's memory, without replicas."""
    plan = run_plan.plan
    counts = count_ranks(config, plan_of_one(plan), run_plan.layers)
    memories = run_memory(config, plan, counts)
    return peaks(lower(plan, run_plan.costs), memories), memories


def run_memory(
    config: RunConfig,
    plan: Plan,
    counts: Sequence[RankCount],
    buckets: Sequence[RankBuckets] = (),
) -> list[RankMemory]:
    """Return the memory of every pipeline rank of a run.

    The plan may have any number of microbatches. A run with replicas has ``buckets``. Without them
    the result lacks the padding of buckets, and the copies in which gradients are reduced.
    """
    keepers = range(plan.ranks - 1) if config.optimizer.post_validation else range(0)
    parallel = config.parallel
    ends = ends_with_copies(plan, config.model.embeds_at_both_ends)
    made = communicators(parallel.grid, ends, links_of(plan), parallel.nccl_blocks)
    memories = []
    for rank, count in enumerate(counts):
        own = buckets[rank] if buckets else None
        padded = count.parameters.all if own is None else own.padded
        static = _parameter_bytes(config, count.parameters, padded, keeps_copy=rank in keepers)
        copy = 0.0 if own is None else _reduced_copy(config, own)
        overlaps = parallel.replicas.overlap
        memories.append(
            RankMemory(
                count,
                static + copy * overlaps,
                copy * (not overlaps),
                made[rank].number,
                made[rank].estimated,
                bytes_on_host(config, count.parameters, keeps_copy=rank in keepers),
            )
        )
    return memories


def _parameter_bytes(
    config: RunConfig, parameters: Parameters, padded: int, *, keeps_copy: bool
) -> float:
    """Return the bytes of parameters, gradients and optimizer state on the device.

    Gradients have the padding of buckets. Where the optimizer is sharded, parameters and states
    have the padding too.

    ``padded`` are the elements of the buckets with their padding. With ``keeps_copy`` the rank has
    a copy of the optimizer's state, to undo steps.
    """
    matrix, other = (count_step(config, matrix=matrix) for matrix in (True, False))
    sharded = config.parallel.replicas.shard_optimizer
    share = padded / max(1, parameters.all) if sharded else 1.0
    states = per_element(config, parameters, matrix.state, other.state) * (share + keeps_copy)
    weights = config.train.dtype.itemsize * share * parameters.all
    return weights + other.gradient * padded + states * (1 - share_on_host(config))


def share_on_host(config: RunConfig) -> float:
    """Return the share of a rank's parameters whose states are on the host.

    Whole parameters are chosen (``optimizer.host_link``), so it is a little more on some ranks.
    """
    states = config.train.host_states
    return 0.0 if states is None else states.fraction


def bytes_on_host(config: RunConfig, parameters: Parameters, *, keeps_copy: bool) -> float:
    """Return the bytes of masters and moments on a rank's host, and of the slots for copies.

    With ``keeps_copy`` the rank has a copy of masters and moments, to undo steps. fp32 weights are
    pinned one by one, and counted as if no allocation were rounded up.
    """
    states = config.train.host_states
    if states is None:
        return 0.0
    count, dtype = count_step_on_host(config), config.train.dtype
    own_master = dtype == torch.float32  # a weight is its own master on a device
    state = (count.state + 4.0 * own_master) * (1 + keeps_copy)
    elements = share_on_host(config) * per_element(config, parameters, 1.0, 1.0)
    in_slot = slot_elements(ceil(elements), largest_part(config, parameters))
    is_gpu = config.parallel.device == "cuda" or config.parallel.gpu is not None
    slot = 0.0
    for size, pins in (
        (count.gradient, states.pins_gradients),
        (0 if own_master else dtype.itemsize, states.pins_weights),
    ):
        slot += pinned(size * in_slot) if pins and is_gpu else size * in_slot
    return state * elements + SLOTS * slot


def largest_part(config: RunConfig, parameters: Parameters) -> int:
    """Return the largest number of elements of one parameter that may travel to the host at once.

    With a sharded optimizer only the parameter's rows in one shard of a bucket travel. A bucket
    takes parameters until it has reached its size, so the last parameter may exceed this size.
    """
    replicas = config.parallel.replicas
    if not replicas.shard_optimizer:
        return parameters.largest
    shards = config.parallel.expert_copies if parameters.experts else replicas.size
    usual = max(DEFAULT_BUCKET_SIZE, DEFAULT_PER_REPLICA * replicas.size)
    size = parameters.all if replicas.buckets else replicas.bucket_size or usual
    return min(parameters.largest, ceil((size + parameters.largest) / shards))


def moved_by_step(config: RunConfig, counts: Sequence[RankCount]) -> list[float]:
    """Return the bytes that the optimizer's step and the norm move on every rank's device."""
    matrix, other = (count_step(config, matrix=matrix) for matrix in (True, False))
    here = 1 - share_on_host(config)
    of_matrix, of_other = (own.normed + here * own.moved for own in (matrix, other))
    moved = [per_element(config, own.parameters, of_matrix, of_other) for own in counts]
    if config.optimizer.post_validation:  # to copy the state is a read and a write
        for rank, own in enumerate(counts[:-1]):
            state = per_element(config, own.parameters, matrix.state, other.state)
            moved[rank] += 2 * here * state
    return moved


def per_element(
    config: RunConfig, parameters: Parameters, of_matrix: float, of_other: float
) -> float:
    """Return a rank's bytes for the parameters that it updates, given the bytes for one element.

    With a sharded optimizer, the ranks with the same parameters share them.
    """
    parallel = config.parallel
    sharded = parallel.replicas.shard_optimizer
    parts, copies = (parallel.replicas.size, parallel.expert_copies) if sharded else (1, 1)
    usual = of_matrix * parameters.matrices + of_other * parameters.others
    return usual / parts + of_matrix * parameters.experts / copies


def _reduced_copy(config: RunConfig, buckets: RankBuckets) -> float:
    """Return the bytes of the copy of a bucket in which gradients are reduced.

    Gradients are copied if they travel in another type. Reductions follow one another, so the
    largest copy counts. The copy is there after the last pass. If reductions overlap with passes,
    it may be there at any time.
    """
    dtype = config.parallel.replicas.reduce_dtype
    if dtype in (None, config.train.gradient_dtype):
        return 0.0
    assert isinstance(dtype, torch.dtype)
    return float(dtype.itemsize * buckets.largest)
