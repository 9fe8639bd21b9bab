"""The GPUs of a job and their links, which turn counted work into seconds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, inf
from typing import ClassVar, Final, Literal

from megatron.schedules.pair_time import beside
from megatron.simulator.costs.collective_time import Links, Path
from megatron.simulator.costs.count import (
    Await,
    Begin,
    Collective,
    CollectiveKind,
    CountedAxis,
    HostWait,
    Launch,
    Pause,
    Work,
)
from megatron.simulator.costs.gpus import HOST_MEMORY
from megatron.simulator.costs.launch_time import Rates

SpreadAxis = CountedAxis | Literal["data"]
"""An axis of counts, or the axis of ranks with the same parameters."""

CHANNEL: Final = 15e9
"""Bytes/s that one multiprocessor moves for a communication. A pass during the communication lacks
the multiprocessors that it occupies: at 234 GB/s, the pace of a ring over the NVLinks of an A100,
16 of 108, as many as NCCL has channels there. Not calibrated."""


@dataclass(frozen=True)
class Cluster:
    """All GPUs of a job, which are alike.

    Attributes:
        rates: the rates of a GPU.
        links: the links between GPUs.
        together: how many ranks of an axis share a machine; all ranks of an absent axis share one.
        channel: bytes/s that a communication moves with one multiprocessor.
        blocks: the most multiprocessors that a communication of an axis may take; an absent axis
            has no limit.
        host: bytes/s of a copy between a GPU and its host.
        host_memory: bytes/s at which the CPU reads and writes the host's memory for a GPU.
    """

    rates: Rates
    links: Links
    together: Mapping[SpreadAxis, int] = field(default_factory=dict)
    channel: float = CHANNEL
    blocks: Mapping[SpreadAxis, int] = field(default_factory=dict)
    host: float = inf
    host_memory: float = HOST_MEMORY

    products_alone: ClassVar[bool] = False
    """All kernels of a pass take time."""

    def seconds(self, work: Work) -> float:
        """Return the seconds of a pass.

        Kernels follow one another. Communications in a ``Begin`` follow one another on a lane
        beside the kernels, until the pass waits for them. The pass waits at once for a
        ``Collective`` that stands alone.
        """
        clock = lane = crowding = 0.0
        ends: list[float] = []
        for step in work.steps:
            match step:
                case Launch():
                    clock = beside(clock, self.rates.seconds(step), lane, crowding)
                case Begin(collectives):
                    lane = max(lane, clock) + sum(map(self.collective, collectives))
                    crowds = (self.crowding(own.axis, own.ranks) for own in collectives)
                    crowding = max(crowds, default=0.0)
                    ends.append(lane)
                case Await(later):
                    clock = max(clock, ends[-1 - later] if later < len(ends) else 0.0)
                case Pause() | HostWait():
                    pass  # a pass alone does not pause; of a host's waits see the class
                case Collective():
                    clock = lane = max(clock, lane) + self.collective(step)
        return max(clock, lane)

    def collective(self, collective: Collective) -> float:
        """Return the seconds of a collective."""
        return self.exchange(collective.axis, collective.kind, collective.ranks, collective.bytes)

    def exchange(self, axis: SpreadAxis, kind: CollectiveKind, ranks: int, size: float) -> float:
        """Return the seconds of a collective of any axis, including the axis of replicas.

        Args:
            axis: the axis whose ranks take part.
            kind: the kind of collective.
            ranks: number of ranks that take part.
            size: bytes of the whole tensor.
        """
        most = self.channel * self.blocks.get(axis, inf)
        return self.links.collective(kind, ranks, size, self._together(axis, ranks), most)

    def ring(self, axis: SpreadAxis, ranks: int) -> Path:
        """Return the bandwidth of a ring of an axis, and the latency of its slowest step."""
        together = self._together(axis, ranks)
        machines = ceil(ranks / together)
        path = self.links.network if machines > 1 else self.links.link
        return Path(self.links.bandwidth(machines, together), path.latency)

    def crowding(self, axis: SpreadAxis, ranks: int) -> float:
        """Return the share by which a collective of an axis slows passes that run meanwhile."""
        together = self._together(axis, ranks)
        moved = self.links.bandwidth(ceil(ranks / together), together)
        return moved / (self.channel * self.rates.multiprocessors)

    def message(self, size: float, *, crossing: bool) -> float:
        """Return the seconds of a message of ``size`` bytes; ``crossing``: between two machines."""
        return self.links.message(size, crossing=crossing)

    def copy(self, size: float) -> float:
        """Return the seconds of a copy of ``size`` bytes between a GPU and its host."""
        return size / self.host

    def _together(self, axis: SpreadAxis, ranks: int) -> int:
        return min(self.together.get(axis, ranks), ranks)
