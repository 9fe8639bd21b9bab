"""The settings of a cluster: its machines, and the links between its GPUs."""

from dataclasses import dataclass

from megatron.flags.declare import flag
from megatron.flags.ranges import BANDWIDTH, LATENCY, RANKS
from megatron.simulator.costs.collective_time import Links
from megatron.simulator.costs.gpus import Gpu


@dataclass(frozen=True)
class ClusterSettings:
    """GPUs and machines."""

    # fmt: off
    ranks_per_node: int | None = flag(None,
        "Ranks of a machine. Links connect them; the network connects machines.", RANKS,
        unset="as the launcher says, or in a dry run as machines with the GPU have: 4 or 8")
    no_numa_binding: bool = flag(False,
        "Let ranks run on any CPU, not only on CPUs that are close to their GPU.")
    link_bandwidth: float | None = flag(None,
        "GB/s in one direction from a GPU to another GPU of its machine, for plans and "
        "predictions.",
        BANDWIDTH, unset="by the GPU")
    link_latency: float | None = flag(None,
        "Microseconds that a message to another GPU of the machine takes besides the time of its "
        "bytes.",
        LATENCY, unset="by the GPU")
    network_bandwidth: float | None = flag(None,
        "GB/s in one direction from a GPU to a GPU of another machine, for plans and predictions.",
        BANDWIDTH, unset="by the GPU")
    network_latency: float | None = flag(None,
        "Microseconds that a message to a GPU of another machine takes besides the time of its "
        "bytes.",
        LATENCY, unset="by the GPU")
    # fmt: on

    def links(self, gpu: Gpu) -> Links:
        """Return the links between the GPUs of a job, inside a machine and between machines."""
        return gpu.links(
            (_times(1e9, self.link_bandwidth), _times(1e-6, self.link_latency)),
            (_times(1e9, self.network_bandwidth), _times(1e-6, self.network_latency)),
        )


def _times(unit: float, value: float | None) -> float | None:
    return None if value is None else unit * value
