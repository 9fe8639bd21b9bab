"""The GPUs of a job and what connects them: seconds of the work that was counted."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from megatron.simulator.costs.collective_time import Links
from megatron.simulator.costs.count import Await, Begin, Collective, CollectiveKind, Launch, Work
from megatron.simulator.costs.launch_time import Rates

SpreadAxis = Literal["tensor", "context", "column", "data"]
"""An axis of counts, or the axis of ranks with the same parameters."""

CROWDING: Final = 0.15
"""Share by which passes become slower while a communication runs beside them: its kernels occupy
multiprocessors. 0.15 are 16 of an A100's 108 and 20 of an H100's 132. Not calibrated."""


@dataclass(frozen=True)
class Cluster:
    """All GPUs of a job, which are alike.

    Attributes:
        rates: of a GPU.
        links: between GPUs.
        together: how many ranks of an axis share a machine; all of an absent axis do.
        crowding: share by which passes become slower beside a communication.
    """

    rates: Rates
    links: Links
    together: Mapping[SpreadAxis, int] = field(default_factory=dict)
    crowding: float = CROWDING

    def seconds(self, work: Work) -> float:
        """Return the seconds of a pass.

        Kernels follow one another. Communications that the pass begins follow one another on a lane
        beside it, until the pass waits for them. A communication that stands alone is waited for.
        """
        clock = lane = 0.0
        for step in work.steps:
            match step:
                case Launch():
                    clock = self._beside(clock, lane, self.rates.seconds(step))
                case Begin(collectives):
                    lane = max(lane, clock) + sum(map(self.collective, collectives))
                case Await():
                    clock = max(clock, lane)
                case Collective():
                    clock = lane = max(clock, lane) + self.collective(step)
        return max(clock, lane)

    def collective(self, collective: Collective) -> float:
        """Return the seconds of a collective."""
        together = self.together.get(collective.axis, collective.ranks)
        return self.links.collective(
            collective.kind, collective.ranks, collective.bytes, min(together, collective.ranks)
        )

    def exchange(self, kind: CollectiveKind, replicas: int, size: float) -> float:
        """Return the seconds of a collective of the ranks that have the same parameters.

        Args:
            kind: what it does.
            replicas: their number.
            size: bytes of the whole tensor.
        """
        together = min(self.together.get("data", replicas), replicas)
        return self.links.collective(kind, replicas, size, together)

    def message(self, size: float, *, crossing: bool) -> float:
        """Return the seconds of a message between stages.

        Args:
            size: in bytes.
            crossing: whether the message leaves a machine.
        """
        return self.links.message(size, crossing=crossing)

    def _beside(self, clock: float, lane: float, seconds: float) -> float:
        """Return when a kernel ends that begins at ``clock`` while the lane is busy until ``lane``.

        Args:
            clock: begin.
            lane: end of the communications under way.
            seconds: of the kernel alone.
        """
        busy = max(0.0, lane - clock)
        slow = min(seconds * (1 + self.crowding), busy)
        return clock + slow + seconds - slow / (1 + self.crowding)
