"""The time of a step on the host: copies over the link to the host, and the CPU's own work."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from megatron.optimizer.host_link import BATCH
from megatron.planning.count.optimizer import count_step_on_host
from megatron.planning.host_share import HostShares
from megatron.run.run_config import RunConfig
from megatron.simulator.costs.cluster import Cluster


@dataclass(frozen=True)
class HostStep:
    """The step of a rank for the parameters whose states are on its host, in seconds.

    Attributes:
        out: of copies of gradients to the host.
        update: of the CPU, which moves its tensors at the speed of the host's memory.
        back: of copies of weights to the GPU.
        batches: parts of the step that follow one another.
        overlaps: whether these parts are under way together, each with another batch.
    """

    out: float
    update: float
    back: float
    batches: int
    overlaps: bool

    @property
    def seconds(self) -> float:
        """All seconds. With overlap, the longest part hides the others, but for one batch."""
        parts = self.out, self.update, self.back
        if not self.overlaps:
            return sum(parts)
        return max(parts) + (sum(parts) - max(parts)) / self.batches


def host_steps(config: RunConfig, cluster: Cluster, shares: Sequence[HostShares]) -> list[HostStep]:
    """Return the step on the host of every rank; empty without states on the host.

    ``shares`` says what every rank updates there.
    """
    states, found = config.train.host_states, []
    for number, own in enumerate(() if states is None else shares):
        count, elements = count_step_on_host(config), own.most.elements
        moved = count.moved
        if config.optimizer.post_validation and number < len(shares) - 1:
            moved += 2 * count.state  # a copy of the states, to undo the step
        step = HostStep(
            cluster.copy(count.gradient * elements),
            moved * elements / cluster.host_memory,
            cluster.copy(config.train.dtype.itemsize * elements),
            max(1, ceil(elements / BATCH)),
            overlaps=states is not None and states.overlap_cpu_optimizer_d2h_h2d,
        )
        found.append(step)
    return found
