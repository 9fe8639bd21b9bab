"""What connects the ranks of a replica: links inside of a machine, a network between machines.

A transfer takes a latency, and its bytes over the bandwidth. A collective goes at the pace of its
slowest hop.
"""

from dataclasses import dataclass, replace
from typing import Final

from megatron.simulator.costs.device import NOTIONAL, Device
from megatron.simulator.costs.replicas import Link

Crossing = frozenset[tuple[int, int]]
"""Pairs of pipeline ranks, ascending, whose messages leave a machine."""


@dataclass(frozen=True)
class Machines:
    """Which ranks of a replica are in different machines.

    Attributes:
        network: what connects machines, in the unit of time of the device it goes with; ``None``:
            all ranks are in one machine.
        crossing: pipeline ranks that are in different ones.
        tensor: whether ranks that share a layer are.
    """

    network: Link | None = None
    crossing: Crossing = frozenset()
    tensor: bool = False

    def between(self, device: Device, one: int, other: int) -> Device:
        """Return ``device`` with the link that connects two pipeline ranks."""
        pair = min(one, other), max(one, other)
        return self._over(device, leaves=pair in self.crossing)

    def along(self, device: Device) -> Device:
        """Return ``device`` with the slowest link of the pipeline."""
        return self._over(device, leaves=bool(self.crossing))

    def across(self, device: Device) -> Device:
        """Return ``device`` with the slowest link of the ranks that share a layer."""
        return self._over(device, leaves=self.tensor)

    def _over(self, device: Device, *, leaves: bool) -> Device:
        if self.network is None or not leaves:
            return device
        own = self.network
        return replace(device, link_bandwidth=own.bandwidth, link_latency=own.latency)


ONE_MACHINE: Final = Machines()


@dataclass(frozen=True)
class Interconnect:
    """The links of a job.

    Attributes:
        link: between two ranks of a machine, in bytes/s and seconds.
        network: between ranks of different machines.
        rate: FLOP/s that passes attain; by it the time of a transfer compares with FLOPs.
    """

    link: Link
    network: Link
    rate: float

    def on(self, device: Device) -> Device:
        """Return ``device``, whose unit of time is the second, with the links of a machine."""
        return replace(device, link_bandwidth=self.link.bandwidth, link_latency=self.link.latency)

    @property
    def notional(self) -> Device:
        """The notional device, whose unit of time is the FLOP, with the links of a machine."""
        return Interconnect(self._in_flops(self.link), self.network, 1.0).on(NOTIONAL)

    @property
    def notional_network(self) -> Link:
        """The network in the notional device's unit of time."""
        return self._in_flops(self.network)

    def _in_flops(self, link: Link) -> Link:
        return Link(link.bandwidth / self.rate, link.latency * self.rate)
