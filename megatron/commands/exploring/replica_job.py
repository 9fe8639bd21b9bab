"""Replicas of the pipeline: their exchanges, and the costs of these for a model on a GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from megatron.schedules.costs import Costs, Exchange
from megatron.schedules.needs import CommKind
from megatron.simulator.costs.cluster import Cluster
from megatron.simulator.costs.replicas import Replicas
from megatron.simulator.exchange import EvenBuckets, Overlap

MOST_BUCKETS: Final = 64
"""Buckets of a chunk: with more of them a page has more to draw than a reader can see."""


@dataclass(frozen=True)
class ReplicaJob:
    """Replicas of the pipeline, each pair of neighbours in two machines.

    Attributes:
        count: how many, d.
        buckets: of each chunk, and of each vocabulary layer that is split; all are of one size.
        overlap_reduce: reduce gradients (RG) beside passes, not after the last one.
        sharded: each replica updates (U) a part of the parameters, and gathers (AG) the others.
        overlap_gather: gather beside passes that do not read the parameters, not before the first.

    Raises:
        ValueError: for fewer than two replicas, or a number of buckets that is out of range.
    """

    count: int = 2
    buckets: int = 1
    overlap_reduce: bool = False
    sharded: bool = False
    overlap_gather: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.count <= 10**6:
            raise ValueError(
                f"{self.count} replicas: give 2 to 10^6; a single pipeline has nobody to exchange "
                "anything with"
            )
        if not 1 <= self.buckets <= MOST_BUCKETS:
            raise ValueError(f"{self.buckets} buckets of a chunk: give 1 to {MOST_BUCKETS}")

    @property
    def exchanged(self) -> Replicas:
        """The number of replicas, and their exchanges."""
        return Replicas(self.count, sharded=self.sharded)

    @property
    def even_buckets(self) -> EvenBuckets:
        """Buckets of equal size, and when a program exchanges them."""
        return EvenBuckets(
            Overlap(reduce=self.overlap_reduce, updates=self.sharded, gather=self.overlap_gather),
            self.buckets,
        )

    @property
    def flags(self) -> list[str]:
        """The flags of ``tools/simulate.py`` that ask for them."""
        words = ["--replicas", str(self.count)]
        words += ["--overlap-grad-reduce"] if self.overlap_reduce else []
        words += ["--use-distributed-optimizer"] if self.sharded else []
        words += ["--overlap-param-gather"] if self.overlap_gather else []
        return words if self.buckets == 1 else [*words, "--buckets", str(self.buckets)]

    def added_to(
        self,
        costs: Costs,
        cluster: Cluster,
        parameters: Sequence[float],
        update: Sequence[float],
        buckets: int,
    ) -> Costs:
        """Return costs in seconds with those of the exchange.

        Args:
            costs: without them.
            cluster: the GPUs, and what connects replicas.
            parameters: of every pipeline rank.
            update: for every pipeline rank, seconds in which it updates all that is its own.
            buckets: of a rank. Each takes the latency of its ring in addition to its bytes.
        """
        link = cluster.ring("data", self.count)
        exchanges: dict[CommKind, Exchange] = {"RG": self.exchanged.reduction(parameters, link)}
        if self.sharded:
            exchanges["AG"] = self.exchanged.gathering(parameters, link)
            costs = replace(costs, passes={**costs.passes, "U": list(update)})
        return replace(costs, exchanges=_in_times(exchanges, buckets))


def _in_times(exchanges: Mapping[CommKind, Exchange], buckets: int) -> dict[CommKind, Exchange]:
    """Return exchanges whose times hold the latencies, which a file of costs has no place for."""
    return {
        kind: Exchange([time + buckets * own.latency for time in own.times])
        for kind, own in exchanges.items()
    }
