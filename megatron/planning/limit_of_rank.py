"""A limit of memory, in percent or in GiB, as the bytes that the tensors of a rank may take.

Every rank has the same limit. Where ranks have different memory, the percentage is one of the
smallest memory of all, and no rank gets more than that one can use.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron.planning.host_room import machine_memory
from megatron.run.own_memory import OwnMemory
from megatron.run.run_config import RunConfig
from megatron.schedules.counted import counted
from megatron.schedules.limits import LimitByMemory
from megatron.simulator.costs.gpus import USABLE
from megatron.simulator.costs.rank_memory import RankMemory
from megatron.simulator.units import MEMORY


class Use(NamedTuple):
    """The bytes of a rank under a plan.

    Attributes:
        rank: its number in the pipeline.
        peak: the most bytes that it holds.
        room: the most bytes that it may hold.
        usable: the most bytes that it could hold, without the limit.
    """

    rank: int
    peak: float
    room: float
    usable: float

    @property
    def is_beyond(self) -> bool:
        """Whether the rank holds too much."""
        return self.peak > self.room


@dataclass(frozen=True)
class MemoryLimit:
    """The memory that the tensors of every rank may take.

    Attributes:
        memory: the memory of a rank.
        asked: the limit that the run asks for.
    """

    memory: OwnMemory
    asked: LimitByMemory

    @property
    def bytes(self) -> float:
        """The asked bytes."""
        return self.asked.bytes(self.memory.bytes)

    @property
    def room(self) -> float:
        """The asked bytes, or those that tensors can use, if these are fewer."""
        return min(self.bytes, self.memory.usable)

    def use(self, rank: int, peak: float, own: RankMemory) -> Use:
        """Return the bytes of a rank whose tensors hold ``peak`` bytes at most."""
        usable = self.memory.usable - own.outside
        held = peak + own.on_host * self.memory.with_host
        return Use(rank, held, min(self.bytes, usable), usable)

    def way_out(self, use: Use) -> str:
        """Return the advice for a rank that holds too much."""
        if use.peak > use.usable:
            most = MEMORY.write(use.usable)
            return f"tensors can use {most}, so no limit would help; --dry-run says what fits"
        return f"give {self.asked.enough(use.peak, self.memory.bytes)} or more"

    def in_words(self) -> str:
        """Return the limit in words: flag, bytes, and the memory of which they are a part."""
        most = ""
        if self.bytes > self.memory.usable:
            most = f", of which tensors can use {MEMORY.write(self.memory.usable)}"
        return (
            f"{self.asked}: the limit of a rank is {MEMORY.write(self.bytes)} "
            f"of the {MEMORY.write(self.memory.bytes)} of {self.memory.named}{most}"
        )


def memory_limit_of(config: RunConfig) -> MemoryLimit | None:
    """Return the limit of a run by memory; ``None``: it has none."""
    asked = config.parallel.planning.limit_by_memory
    return None if asked is None else MemoryLimit(memory_of(config), asked)


def memory_of(config: RunConfig) -> OwnMemory:
    """Return the memory for which a run is planned.

    Before the ranks meet, the result is the memory of this rank; afterwards it is the smallest
    memory of all ranks. A known GPU has the memory of its data sheet, so a dry run and a run have
    the same limit.
    Of other GPUs the driver tells the memory. Ranks on CPUs have equal parts of the machine's
    memory.
    """
    parallel = config.parallel
    if parallel.memory is not None:
        return parallel.memory
    if parallel.gpu is not None:
        gpu = parallel.gpu
        return OwnMemory(gpu.memory, gpu.usable, gpu.name)
    if parallel.devices.device == "cuda":
        own = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK") or 0))
        return OwnMemory(own.total_memory, USABLE * own.total_memory, own.name)
    ranks = parallel.cluster.ranks_per_node or parallel.grid.world_size
    memory = machine_memory() / ranks
    named = f"a rank on a machine with {counted(ranks, 'rank')}"
    return OwnMemory(memory, memory, named, with_host=True)


def smallest_memory(config: RunConfig, memories: Sequence[OwnMemory]) -> OwnMemory:
    """Return the memory, of all ranks' memories in their order, that leaves tensors the least."""
    asked = config.parallel.planning.limit_by_memory
    assert asked is not None, "the run has a limit by memory"
    return min(memories, key=lambda own: (MemoryLimit(own, asked).room, own.usable))
