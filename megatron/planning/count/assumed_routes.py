"""Experts on other ranks, for a count: how many tokens come to them is assumed.

A count has no values, so nobody knows what routers choose. All ranks of a stage wait for the
busiest rank, so the busiest rank is counted. By default all ranks have equally many tokens, the
case for which a job is laid out. Where the host would wait for the numbers, the count says so.
"""

from math import ceil, comb
from typing import Any

import torch
from torch import Tensor

from megatron.parallel.deep_ep import Handle
from megatron.parallel.experts import ExchangingExperts, GatheringExperts
from megatron.parallel.groups import ConnectedAxis
from megatron.planning.count.recorder import Recorder
from megatron.simulator.costs.count import Collective


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

    def read_rows(self, rows: Tensor, most: int) -> list[int]:
        """As in ``GatheringExperts``, with the assumed number."""
        self._recorder.let_the_host_wait()
        return [busiest(most, self.size, self._imbalance)]


class AssumedExchange(AssumedGathering, ExchangingExperts):
    """Experts with which tokens are exchanged; arguments as for ``AssumedGathering``."""

    def read_rows(self, rows: Tensor, most: int) -> list[int]:
        """As in ``GatheringExperts``, with the assumed numbers."""
        self._recorder.let_the_host_wait()
        return assumed_rows(most, self.rank, self.size, self.tensor_size, self._imbalance)


class AssumedBuffer:
    """The class ``Buffer`` of the package DeepEP for a count: rows and numbers are assumed.

    Time is counted as if every travel were an all-to-all of NCCL. The memory of the package's own
    buffers is not counted.

    Args:
        recorder: lists the travels, and notes where the host waits.
        ranks: over which experts are spread.
        imbalance: slots of this rank, divided by the mean of all ranks.
    """

    def __init__(self, recorder: Recorder, ranks: int, imbalance: float = 1.0) -> None:
        self._recorder, self._ranks, self._imbalance = recorder, ranks, imbalance

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        """As the package's, without values; one program writes which token goes to which rank."""
        by_rank, by_expert = (
            topk_idx.new_empty(size, dtype=torch.int32) for size in (self._ranks, num_experts)
        )
        is_sent = topk_idx.new_zeros((len(topk_idx), self._ranks), dtype=torch.bool)
        return by_rank, None, by_expert, is_sent, None

    def dispatch(self, x: Tensor, handle: Handle | None = None, **named: Any) -> tuple[Any, ...]:
        """As the package's, with the assumed number of rows."""
        if handle is not None:
            rows = x.new_empty((len(handle[0]), x.shape[1]))
            self._travel(rows)
            return rows, None, None, None, None, None
        chosen, weights = named["topk_idx"], named["topk_weights"]
        experts, choices = len(named["num_tokens_per_expert"]), chosen.shape[1]
        own = busiest(chosen.numel(), self._ranks, self._imbalance)
        from_each = visitors(len(x), choices, experts, self._ranks, self._imbalance)
        arrived = self._ranks * from_each
        self._recorder.let_the_host_wait()
        results = [each.new_empty((arrived, each.shape[1])) for each in (x, chosen, weights)]
        self._travel(*results)
        source, heads = (
            chosen.new_empty(shape, dtype=torch.int32)
            for shape in ((arrived,), (len(x), self._ranks))
        )
        slots, here = own * self._ranks, experts // self._ranks
        times = [slots // here + (expert < slots % here) for expert in range(here)]
        return *results, times, (source, heads, named["is_token_in_rank"]), None

    def combine(
        self,
        x: Tensor,
        handle: Handle,
        topk_weights: Tensor | None = None,
        *,
        async_finish: bool = False,
    ) -> tuple[Any, ...]:
        """As the package's, without values."""
        assert not async_finish, "a count has no pairs"
        tensors = [x] if topk_weights is None else [x, topk_weights]
        self._travel(*tensors)
        sums = [each.new_empty((len(handle[1]), each.shape[1])) for each in tensors]
        return sums[0], sums[1] if len(sums) > 1 else None, None

    def _travel(self, *rows: Tensor) -> None:
        size = sum(each.numel() * each.element_size() for each in rows)
        self._recorder.communicate(Collective("all_to_all", "experts", self._ranks, size))


def visitors(tokens: int, choices: int, experts: int, ranks: int, imbalance: float = 1.0) -> int:
    """Return how many tokens of each rank visit the busiest rank, if all choices are as likely.

    A token visits a rank unless all of its choices are elsewhere. If tokens choose from groups of
    experts, they visit fewer ranks.

    Args:
        tokens: of each rank.
        choices: different experts of a token.
        experts: of the layer.
        ranks: over which they are spread, each with equally many.
        imbalance: choices of this rank's experts, divided by the mean of all ranks.
    """
    elsewhere = comb(experts - experts // ranks, choices) / comb(experts, choices)
    return min(tokens, ceil(tokens * (1 - elsewhere) * imbalance))


def busiest(slots: int, ranks: int, imbalance: float) -> int:
    """Return how many of the ``slots`` of all ranks the busiest rank has; at most all."""
    return min(slots, int(slots // ranks * imbalance))


def assumed_rows(
    leaving: int, rank: int, ranks: int, tensor_ranks: int, imbalance: float = 1.0
) -> list[int]:
    """Return how many rows this rank sends to every place, and how many arrive from every place.

    Every rank sends equally many rows, most of them to this rank. The order is the one in which
    ``ExchangingExperts.journey`` reads the numbers.

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
    return [*others[:rank], own, *others[rank:], *[own] * (ranks * tensor_ranks)]
