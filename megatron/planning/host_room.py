"""Whether the memory of a machine has room for all that its ranks keep on their host.

All ranks of a machine share its memory. Masters and moments of the optimizer, slots for their
copies, and buffers for activations are counted. The processes themselves are not, nor are data and
checkpoints, so a run that is refused could not have gone on.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from megatron.parallel.placement import Placement
from megatron.runtime.host_rooms import Rooms, take_all
from megatron.schedules.counted import counted
from megatron.schedules.lower import Program
from megatron.schedules.needs import Comm
from megatron.simulator.costs.count import RankCount
from megatron.simulator.units import MEMORY

CONTROL_GROUPS: Final = Path("/sys/fs/cgroup")
"""Where Linux shows the limits of control groups: of containers, and of the jobs of a cluster."""

OWN_GROUPS: Final = Path("/proc/self/cgroup")
"""The control groups of this process, a line each: ``number:controllers:path``."""


def activations_on_host(program: Program, count: RankCount, rank: int) -> int:
    """Return the bytes of the host's buffers for the activations that ``rank`` copies there."""
    plan, rooms = program.plan, Rooms()

    def size_of(comm: Comm) -> int:
        own, n = count.of_slice(comm.slice, plan.slices)
        return ceil(own.moved.get(plan.stages[comm.stage][1], 0) / n)

    take_all(program, rank, size_of, rooms)
    return rooms.bytes


class HostUse(NamedTuple):
    """The bytes that the ranks of one machine keep in the memory of their host.

    Attributes:
        ranks: ranks of the machine.
        states: bytes of the optimizer's masters and moments, and of the slots for their copies.
        activations: bytes of the buffers for activations.
    """

    ranks: int
    states: float
    activations: float

    @property
    def bytes(self) -> float:
        """All bytes."""
        return self.states + self.activations

    def fits(self, memory: float | None) -> bool:
        """Return whether a machine with ``memory`` has room; ``None``: it is not known."""
        return memory is None or self.bytes <= memory

    @property
    def in_words(self) -> str:
        """The bytes, and the parts that they consist of."""
        parts = ((self.activations, "activations"), (self.states, "states of the optimizer"))
        named = " and ".join(f"{MEMORY.write(size)} of {name}" for size, name in parts if size)
        keep = "keeps" if self.ranks == 1 else "keep"
        ranks = f"{counted(self.ranks, 'rank')} of a machine {keep}"
        if not (self.states and self.activations):
            return f"{ranks} {named} on the host"
        return f"{ranks} {MEMORY.write(self.bytes)} on the host ({named})"

    @property
    def flags(self) -> str:
        """The flags that put these bytes on the host."""
        return " and ".join(
            ["--cpu-offload"] * bool(self.activations)
            + ["--optimizer-cpu-offload"] * bool(self.states)
        )

    @property
    def way_out(self) -> str:
        """Settings under which the host keeps less."""
        ways = ["--offload-chunk-num"] * bool(self.activations)
        ways += ["--optimizer-offload-fraction"] * bool(self.states)
        return f"lower {' or '.join(ways)}, or run fewer ranks on a machine"


def fullest_host(
    placement: Placement,
    states: Sequence[float],
    activations: Sequence[float],
    pipeline_rank: int | None = None,
) -> HostUse:
    """Return the bytes on the host of that machine whose ranks keep the most.

    Args:
        placement: the ranks of the job in their machines.
        states: bytes of the optimizer's states of every pipeline rank.
        activations: bytes of the buffers for activations of every pipeline rank.
        pipeline_rank: only machines with a rank of this number in its pipeline are looked at;
            ``None``: all machines are.
    """
    machines = defaultdict[int, list[int]](list)
    for rank in range(placement.grid.world_size):
        own = placement.grid.coordinates(rank).pipeline
        machines[rank // placement.ranks_per_machine].append(own)
    uses = (
        HostUse(len(own), sum(states[r] for r in own), sum(activations[r] for r in own))
        for own in machines.values()
        if pipeline_rank is None or pipeline_rank in own
    )
    return max(uses, key=lambda use: use.bytes)


def machine_memory() -> int:
    """Return the bytes of this machine's memory that the processes of a job may use.

    The limit of a container, or of a job of the cluster, counts where it is lower.
    """
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([whole, *_limits()])


def _limits() -> Iterator[int]:
    """Yield the limits of this process's control groups, and of all groups that hold them."""
    lines = OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, name = CONTROL_GROUPS / "memory", "memory.limit_in_bytes"
        elif not controllers:
            root, name = CONTROL_GROUPS, "memory.max"
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        for folder in (own, *own.parents):
            file = root / folder / name
            text = file.read_text().strip() if file.exists() else ""
            if text.isdecimal():  # "max": no limit
                yield int(text)
