"""The communication of a rank with its replicas in an iteration: bytes and time.

Gradients are reduced over d replicas along a ring, because a ring moves the fewest bytes. Every
rank sends (d - 1) / d of the gradients in d - 1 steps until its own part is summed (a
reduce-scatter), and then the same amount again until all ranks have all sums (an all-reduce). With
a sharded optimizer (ZeRO-1, arXiv 1910.02054), the ranks stop after the reduce-scatter. Each
updates its own part of the parameters, and then the updated parameters go around the ring instead
of the sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from megatron.schedules.costs import Exchange
from megatron.simulator.costs.collective_time import Path

PARAMETER_BYTES: Final = 2
"""Bytes of a parameter as passes read it: bf16."""


@dataclass(frozen=True)
class Replicas:
    """The replicas of a job, and the sizes of the numbers that they exchange.

    Attributes:
        count: number of replicas d.
        sharded: whether each replica updates a part of the parameters and gathers the other parts.
        gradient_bytes: bytes of a gradient when it is sent.
        parameter_bytes: bytes of an updated parameter when it is sent.

    Raises:
        ValueError: if there is no replica.
    """

    count: int = 1
    sharded: bool = False
    gradient_bytes: int = 4
    parameter_bytes: int = PARAMETER_BYTES

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"{self.count} replicas: give 1 or more")

    @property
    def optimizer_parts(self) -> int:
        """Ranks that share the optimizer's state of a parameter."""
        return self.count if self.sharded else 1

    def reduced_bytes(self, parameters: float) -> float:
        """Return the bytes that a rank sends for RG, to reduce the gradients of ``parameters``."""
        return self._rounds * self._passed_on(self.gradient_bytes * parameters)

    def gathered_bytes(self, parameters: float) -> float:
        """Return the bytes that a rank sends for AG, to gather updated ``parameters``."""
        return self._passed_on(self.parameter_bytes * parameters) if self.sharded else 0.0

    def reduction(self, parameters: Sequence[float], link: Path) -> Exchange:
        """Return the time of RG; ``parameters`` of every pipeline rank include the padding."""
        times = [self.reduced_bytes(own) / link.bandwidth for own in parameters]
        return Exchange(times, self._rounds * self._steps * link.latency)

    def gathering(self, parameters: Sequence[float], link: Path) -> Exchange:
        """Return the time of AG; the arguments are those of ``reduction``."""
        times = [self.gathered_bytes(own) / link.bandwidth for own in parameters]
        return Exchange(times, self._steps * link.latency if self.sharded else 0.0)

    @property
    def _rounds(self) -> int:
        """Rounds along the ring until a rank has the sums that it needs."""
        return 1 if self.sharded else 2

    @property
    def _steps(self) -> int:
        """Steps of a round."""
        return self.count - 1

    def _passed_on(self, size: float) -> float:
        """Return the bytes that a rank sends in a round that moves ``size`` bytes."""
        return self._steps / self.count * size


ALONE: Final = Replicas()
"""No other replica: nothing is exchanged."""
