"""Experts on other ranks, for a count: every expert has equally many tokens.

A count has no values, so nobody knows what routers choose. That all experts have as many tokens is
the case for which a job is laid out. Where the host would wait for the numbers, the count says so.
"""

from torch import Tensor

from megatron.parallel.experts import ExchangingExperts, GatheringExperts, Journey
from megatron.parallel.groups import ConnectedAxis
from megatron.training.planning.count.recorder import Recorder


class BalancedGathering(GatheringExperts):
    """Experts to which tokens come by gathering.

    Args:
        experts: see ``GatheringExperts``.
        tensor: see there.
        gradients: see there.
        recorder: notes where the host waits.
    """

    def __init__(
        self,
        experts: ConnectedAxis,
        tensor: ConnectedAxis,
        gradients: ConnectedAxis,
        recorder: Recorder,
    ) -> None:
        super().__init__(experts, tensor, gradients)
        self._recorder = recorder

    def own_slots(self, own_last: Tensor, slots: int) -> int:
        """As in ``GatheringExperts``, with equal numbers."""
        self._recorder.let_the_host_wait()
        return slots // self.size


class BalancedExchange(ExchangingExperts):
    """Experts with which tokens are exchanged; arguments as for ``BalancedGathering``."""

    def __init__(
        self,
        experts: ConnectedAxis,
        tensor: ConnectedAxis,
        gradients: ConnectedAxis,
        recorder: Recorder,
    ) -> None:
        super().__init__(experts, tensor, gradients)
        self._recorder = recorder

    def journey(self, times_e: Tensor, arriving: Tensor, leaving: int) -> Journey:
        """As in ``ExchangingExperts``, with equal numbers."""
        self._recorder.let_the_host_wait()
        return balanced_journey(leaving, self.rank, self.size, self.tensor_size)


def balanced_journey(leaving: int, rank: int, ranks: int, tensor_ranks: int) -> Journey:
    """Return the journey of as many rows to every rank.

    Args:
        leaving: rows that each rank sends.
        rank: this rank's place on the axis of experts.
        ranks: size of the axis of experts.
        tensor_ranks: size of the axis ``expert_tensor``.
    """
    each, more = divmod(leaving, ranks)
    sent = tuple(each + (place < more) for place in range(ranks))
    return Journey(sent, (sent[rank],) * ranks, (sent[rank] * ranks,) * tensor_ranks)
