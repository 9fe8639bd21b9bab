"""The parameters whose optimizer states a rank has on its host, chosen as the run chooses them."""

from collections.abc import Sequence
from typing import NamedTuple

from megatron.model.ownership import WORD_EMBEDDINGS
from megatron.optimizer.host_link import chosen_for_host
from megatron.planning.run_buckets import RankBuckets
from megatron.run.run_config import RunConfig
from megatron.runtime.embedding_copies import ranks_with_copies
from megatron.schedules.plan import Plan
from megatron.simulator.costs.count import RankCount


class HostShare(NamedTuple):
    """The parts of parameters that one rank updates on its host.

    Attributes:
        updated: elements of all parts that the rank updates.
        sizes: elements of every part whose states are on the host.
    """

    updated: int
    sizes: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """Elements whose states are on the host."""
        return sum(self.sizes)

    @property
    def here(self) -> float:
        """The share of the elements whose states are on the device."""
        return 1 - self.elements / self.updated if self.updated else 1.0


class HostShares(NamedTuple):
    """Of the replicas of a pipeline rank, the shares that leave most on the device and on the host.

    Only replicas with a sharded optimizer differ.
    """

    least: HostShare
    most: HostShare


def host_shares(
    config: RunConfig, plan: Plan, counts: Sequence[RankCount], buckets: Sequence[RankBuckets]
) -> list[HostShares]:
    """Return the shares of every pipeline rank.

    Args:
        config: the run.
        plan: tells whether several stages have copies of the embedding.
        counts: of the ranks, with their parameters.
        buckets: of the ranks; only a sharded optimizer needs them.
    """
    states, copied = config.train.host_states, frozenset[str]()
    if states is None:
        return [HostShares(*[HostShare(own.parameters.all)] * 2) for own in counts]
    holders = ranks_with_copies(plan, tied=config.model.vocabulary.tie_embeddings)
    if len(holders) > 1:
        copied = frozenset((WORD_EMBEDDINGS,))

    fraction = states.optimizer_offload_fraction

    def share(sizes: Sequence[tuple[str, int]]) -> HostShare:
        chosen = chosen_for_host(sizes, fraction, copied)
        return HostShare(sum(size for _, size in sizes), tuple(sizes[at][1] for at in chosen))

    sharded, found = config.parallel.replicas.shard_optimizer, []
    for rank, own in enumerate(counts):
        shares = list(map(share, buckets[rank].parts if sharded else [own.parameters.sizes]))
        least = max(shares, key=lambda one: one.here)
        found.append(HostShares(least, max(shares, key=lambda one: one.elements)))
    return found
