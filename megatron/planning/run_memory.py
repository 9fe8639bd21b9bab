"""The memory of every rank of a run on GPUs, from the count of the code."""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import torch

from megatron.layers.vocabulary.rooms import RoomSizes
from megatron.optimizer.host_link import SLOTS, slot_elements
from megatron.parallel.communicators import communicators
from megatron.planning.count.optimizer import (
    TABLE_BYTES,
    count_rounding,
    count_step,
    count_step_on_host,
)
from megatron.planning.count.run import count_ranks
from megatron.planning.host_share import HostShare, HostShares, host_shares
from megatron.planning.planned_run import RunPlan
from megatron.planning.run_buckets import RankBuckets, run_buckets
from megatron.run.run_config import RunConfig
from megatron.runtime.communicator import links_of
from megatron.runtime.embedding_copies import ranks_with_copies
from megatron.runtime.host_rooms import pinned
from megatron.schedules.plan import Plan, plan_of_one
from megatron.simulator.costs.count import Parameters, RankCount
from megatron.simulator.costs.gpus import Gpu
from megatron.simulator.costs.rank_memory import RankMemory, peaks
from megatron.simulator.units import MEMORY


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
    """Return the most bytes that each rank holds, and each rank's memory.

    Replicas are left out, but for shards of an optimizer whose states are on the host, or of
    weights that are gathered in 8 bits.
    """
    plan = run_plan.plan
    replicas = config.parallel.replicas
    sharded = replicas.shard_optimizer and config.train.host_states is not None
    buckets = run_buckets(config, run_plan) if sharded or replicas.gathers_eight_bits else ()
    counts = count_ranks(config, plan_of_one(plan), run_plan.layers)
    memories = run_memory(config, plan, counts, buckets, config.parallel.gpu)
    return peaks(run_plan.program, memories), memories


def run_memory(
    config: RunConfig,
    plan: Plan,
    counts: Sequence[RankCount],
    buckets: Sequence[RankBuckets] = (),
    gpu: Gpu | None = None,
) -> list[RankMemory]:
    """Return the memory of every pipeline rank of a run.

    The plan may have any number of microbatches. A run with replicas has ``buckets``. Without them
    the result lacks the padding of buckets, and the copies in which gradients are reduced. Without
    a ``gpu`` it lacks the workspaces of products.
    """
    workspaces = 0.0 if gpu is None else gpu.workspaces
    if config.train.captures_passes:
        workspaces *= 2  # graphs are captured on a stream of their own, and keep its workspaces
    keepers = range(plan.ranks - 1) if config.optimizer.post_validation else range(0)
    parallel = config.parallel
    ends = ranks_with_copies(plan, tied=config.model.vocabulary.tie_embeddings)
    made = communicators(parallel.grid, ends, links_of(plan), parallel.nccl_blocks)
    shares, memories = host_shares(config, plan, counts, buckets), []
    for rank, count in enumerate(counts):
        own = buckets[rank] if buckets else None
        padded = count.parameters.all if own is None else own.padded
        keeps = rank in keepers
        static = _parameter_bytes(config, count.parameters, padded, shares[rank].least, keeps)
        static -= _saved_by_eight_bits(config, own)
        copy = 0.0 if own is None else _reduced_copy(config, own)
        overlaps = parallel.replicas.overlap
        memories.append(
            RankMemory(
                count,
                static + copy * overlaps,
                copy * (not overlaps),
                made[rank].number,
                made[rank].estimated,
                bytes_on_host(config, shares[rank].most, keeps),
                workspaces,
                RoomSizes,
            )
        )
    return memories


def _parameter_bytes(
    config: RunConfig, parameters: Parameters, padded: int, on_host: HostShare, keeps_copy: bool
) -> float:
    """Return the bytes of parameters, gradients, optimizer state and its tables on the device.

    Gradients have the padding of buckets. Where the optimizer is sharded, parameters and states
    have the padding too.

    ``padded`` are the elements of the buckets with their padding, ``on_host`` are the parts whose
    states are not on the device. With ``keeps_copy`` the rank has a copy of the optimizer's state,
    to undo steps.
    """
    matrix, other = (count_step(config, matrix=matrix) for matrix in (True, False))
    sharded = config.parallel.replicas.shard_optimizer
    share = padded / max(1, parameters.all) if sharded else 1.0
    states = per_element(config, parameters, matrix.state, other.state) * (share + keeps_copy)
    weights = config.train.dtype.itemsize * share * parameters.all
    tables = per_element(config, parameters, TABLE_BYTES, TABLE_BYTES)
    return weights + other.gradient * padded + states * on_host.here + tables


def shared_states(config: RunConfig, parameters: Parameters) -> float:
    """Return the bytes of a rank's optimizer states that its replicas share with it."""
    if not config.parallel.replicas.shard_optimizer:
        return 0.0
    matrix, other = (count_step(config, matrix=matrix) for matrix in (True, False))
    return per_element(config, parameters, matrix.state, other.state)


def _saved_by_eight_bits(config: RunConfig, buckets: RankBuckets | None) -> float:
    """Return the bytes of weights that a rank need not hold because they are gathered in 8 bits.

    It holds all of them in 8 bits, and those that it updates in the activations' dtype.
    """
    if buckets is None:
        return 0.0
    size = config.train.dtype.itemsize
    return float((size - 1) * buckets.narrow - size * buckets.narrow_own)


def bytes_on_host(config: RunConfig, share: HostShare, keeps_copy: bool) -> float:
    """Return the bytes of masters and moments on a rank's host, and of the slots for copies.

    An fp32 weight is its own master. The host has such weights one by one, and pins them.

    Args:
        config: the run.
        share: the parts whose states are on the host.
        keeps_copy: whether the rank has a copy of masters and moments, to undo steps.
    """
    states, parallel = config.train.host_states, config.parallel
    if states is None:
        return 0.0
    is_gpu = parallel.devices.device == "cuda" or parallel.gpu is not None

    def room(size: int, pins: bool) -> int:
        return pinned(size) if pins and is_gpu else size

    count, dtype, elements = count_step_on_host(config), config.train.dtype, share.elements
    held = count.state * (1 + keeps_copy) * elements
    of_weight = dtype.itemsize
    if dtype == torch.float32:
        of_weight = 0
        weights = [dtype.itemsize * size for size in share.sizes]
        held += sum(room(size, states.pins_weights) + size * keeps_copy for size in weights)
    in_slot = slot_elements(share.sizes)
    slot = room(ceil(count.gradient * in_slot), states.pins_gradients)
    return held + SLOTS * (slot + room(of_weight * in_slot, states.pins_weights))


def moved_by_step(
    config: RunConfig,
    counts: Sequence[RankCount],
    shares: Sequence[HostShares],
    buckets: Sequence[RankBuckets] = (),
) -> list[float]:
    """Return the bytes that the optimizer's step and the norm move on every rank's device.

    Updates of whole matrices (Muon) are left out: ``matrix_steps`` has their time.
    The step includes the rounding of weights that are gathered in 8 bits, if ``buckets`` are given.
    ``shares`` says what every rank updates on its host.
    """
    matrix, other = (count_step(config, matrix=matrix) for matrix in (True, False))
    if config.optimizer.takes_whole_matrices:
        matrix = matrix._replace(moved=0.0)
    moved = []
    for rank, (own, share) in enumerate(zip(counts, shares, strict=True)):
        here = share.least.here
        of_matrix, of_other = (step.normed + here * step.moved for step in (matrix, other))
        moved.append(per_element(config, own.parameters, of_matrix, of_other))
        if config.optimizer.post_validation and rank < len(counts) - 1:
            state = per_element(config, own.parameters, matrix.state, other.state)
            moved[rank] += 2 * here * state  # to copy the state is a read and a write
    if config.parallel.replicas.gathers_eight_bits:
        rounded = count_rounding(config)
        for rank, bucket in enumerate(buckets):
            moved[rank] += rounded * bucket.narrow_own
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
