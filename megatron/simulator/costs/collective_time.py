"""Seconds of communications, from latencies and bandwidths of links.

A collective goes along a ring (arXiv 1802.05799). To gather or to scatter, each of the n ranks
sends (n - 1) / n of the bytes in n - 1 steps. In an all-reduce, each rank sends twice as much in
twice as many steps. A broadcast or a reduction sends everything once along the ring, in pieces. An
all-reduce of few bytes goes along a tree, which has fewer steps. NCCL chooses in the same way
(``src/graph/tuning.cc``).

In an all-to-all every rank sends each of the others its part at once: some parts within the
machine, the others over its own network adapter. The slower of the two decides.

A machine has one network adapter for each GPU. NCCL uses the adapters of all ranks of a group in a
machine. So the ring of a group with g ranks in each machine has the bandwidth of g adapters, or the
bandwidth of the links within a machine if these are slower.
"""

from dataclasses import dataclass
from math import ceil, inf, isfinite, log2
from typing import Final

from megatron.simulator.costs.count import CollectiveKind

LAUNCH: Final = 8.4e-6
LINK_STEP: Final = 3.4e-6
NETWORK_STEP: Final = 14e-6
"""Seconds that a collective takes in addition to its steps; seconds of a step within a machine;
seconds of a step between machines. NCCL's own model, protocol Simple of a ring
(``src/graph/tuning.cc``)."""

TREE_SHARE: Final = 0.92
"""Bandwidth of a tree as a share of a ring's, from the same model of NCCL."""


@dataclass(frozen=True)
class Path:
    """A way from one rank to others.

    Attributes:
        bandwidth: bytes that communications attain in one direction, per second or per other unit
            of time.
        latency: time of a step, in addition to the time of its bytes.

    Raises:
        ValueError: if the bandwidth is not above 0, or the latency is below 0 or infinite.
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(f"a bandwidth of {self.bandwidth:g}: give a number above 0")
        if not (isfinite(self.latency) and self.latency >= 0):
            raise ValueError(f"a latency of {self.latency:g}: give a time, 0 or more")


@dataclass(frozen=True)
class Links:
    """The connections between the GPUs of a job.

    Attributes:
        link: between two GPUs of a machine.
        network: between GPUs of different machines, over a GPU's own network adapter.
    """

    link: Path
    network: Path

    def message(self, size: float, *, crossing: bool) -> float:
        """Return the seconds of a message of ``size`` bytes; ``crossing``: between two machines."""
        path = self.network if crossing else self.link
        return LAUNCH + path.latency + size / path.bandwidth

    def collective(
        self, kind: CollectiveKind, ranks: int, size: float, together: int, most: float = inf
    ) -> float:
        """Return the seconds of a collective.

        Args:
            kind: the kind of collective.
            ranks: number of ranks that take part.
            size: bytes of the whole tensor; of a shift, bytes of a rank's message.
            together: how many of the ranks share a machine.
            most: bytes/s that the collective's kernel moves at most, however fast the links are.
        """
        if ranks < 2:
            return 0.0
        machines = ceil(ranks / together)
        if kind == "all_to_all":
            return self._pairwise(ranks, size, together, most)
        if kind == "shift":
            return self.message(size, crossing=machines > 1)  # the slowest rank's message
        pace = min(most, self.bandwidth(machines, together))
        ring = self._ring(kind, ranks, size, machines, pace)
        if kind != "all_reduce":
            return ring
        return min(ring, self._tree(ranks, size, machines, together, pace))

    def bandwidth(self, machines: int, together: int) -> float:
        """Return the bandwidth of a ring, in bytes/s."""
        if machines == 1:
            return self.link.bandwidth
        network = together * self.network.bandwidth
        return min(network, self.link.bandwidth) if together > 1 else network

    def _ring(
        self, kind: CollectiveKind, ranks: int, size: float, machines: int, pace: float
    ) -> float:
        rounds = 2 if kind == "all_reduce" else 1
        whole = kind in ("broadcast", "reduce")
        sent = size if whole else rounds * (ranks - 1) / ranks * size
        steps, crossings = rounds * (ranks - 1), rounds * (machines - 1)
        waits = (steps - crossings) * self.link.latency + crossings * self.network.latency
        return LAUNCH + waits + sent / pace

    def _pairwise(self, ranks: int, size: float, together: int, most: float) -> float:
        """Return the seconds of an all-to-all; each rank sends ``size / ranks`` to each."""
        near, far = min(together, ranks) - 1, ranks - min(together, ranks)
        within = near / ranks * size / min(most, self.link.bandwidth)
        between = far / ranks * size / min(most, self.network.bandwidth)
        path = self.network if far else self.link
        return LAUNCH + path.latency + max(within, between)

    def _tree(self, ranks: int, size: float, machines: int, together: int, pace: float) -> float:
        """Return the seconds of an all-reduce up and down a tree of machines."""
        within = min(together, ranks) - 1
        waits = within * self.link.latency + ceil(log2(machines)) * self.network.latency
        return LAUNCH + 2 * waits + 2 * (ranks - 1) / ranks * size / (TREE_SHARE * pace)
