"""Experts on other ranks, for a count: how many tokens come to them is assumed.

A count has no values, so nobody knows what routers choose. All ranks of a stage wait for the
busiest rank, so the busiest rank is counted. By default all ranks have equally many tokens, the
case for which a job is laid out. Where the host would wait for the numbers, the count says so.
"""

from torch import Tensor

from megatron.parallel.experts import ExchangingExperts, GatheringExperts, Journey
from megatron.parallel.groups import ConnectedAxis
from megatron.training.planning.count.recorder import Recorder


class AssumedGathering(GatheringExperts):
    """Experts to which tokens come by gathering.

    Args:
        experts: see ``GatheringExperts``.
        tensor: see there.
        gradients: see there.
        recorder: notes where the host waits.
        imbalance: slots of this rank, divided by the mean of all ranks.
    """

    def __init__(
        self,
        experts: ConnectedAxis,
        tensor: ConnectedAxis,
        gradients: ConnectedAxis,
        recorder: Recorder,
        imbalance: float = 1.0,
    ) -> None:
        super().__init__(experts, tensor, gradients)
        self._recorder, self._imbalance = recorder, imbalance

    def own_slots(self, own_last: Tensor, slots: int) -> int:
        """As in ``GatheringExperts``, with the assumed number."""
        self._recorder.let_the_host_wait()
        return busiest(slots, self.size, self._imbalance)


class AssumedExchange(AssumedGathering, ExchangingExperts):
    """Experts with which tokens are exchanged; arguments as for ``AssumedGathering``."""

    def journey(self, times_e: Tensor, arriving: Tensor, leaving: int) -> Journey:
        """As in ``ExchangingExperts``, with the assumed numbers."""
        self._recorder.let_the_host_wait()
        return assumed_journey(leaving, self.rank, self.size, self.tensor_size, self._imbalance)


def busiest(slots: int, ranks: int, imbalance: float) -> int:
    """Return how many of the ``slots`` of all ranks the busiest rank has; at most all."""
    return min(slots, int(slots // ranks * imbalance))


def assumed_journey(
    leaving: int, rank: int, ranks: int, tensor_ranks: int, imbalance: float = 1.0
) -> Journey:
    """Return the journey in which every rank sends equally many rows, most of them to this rank.

    Args:
        leaving: rows that each rank sends.
        rank: this rank's place on the axis of experts.
        ranks: size of the axis of experts.
        tensor_ranks: size of the axis ``expert_tensor``.
        imbalance: rows for this rank, divided by the mean of all ranks.
    """
    own = busiest(leaving, ranks, imbalance)
    each, more = divmod(leaving - own, max(1, ranks - 1))
    others = [each + (place < more) for place in range(ranks - 1)]
    sent = (*others[:rank], own, *others[rank:])
    return Journey(sent, (own,) * ranks, (own * ranks,) * tensor_ranks)
