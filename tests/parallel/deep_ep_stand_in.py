"""A stand-in for the package DeepEP: the published methods of its ``Buffer``, over gloo.

Version 1.2.1 of https://github.com/deepseek-ai/DeepEP, as its documentation and its checks have it.
Where a call is asynchronous, results are NaN until somebody waits for the call's event.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CALLS: list[tuple[str, int, bool]] = []
"""The calls that moved rows, in their order: the method, the rows that this rank has got, and
whether weights travelled with them."""

RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""Numbers of ranks for which the package has settings."""


class EventOverlap:
    """The end of an asynchronous call.

    Args:
        late: results with their values, which they get when somebody waits.
    """

    def __init__(self, late: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        self._late = late

    def current_stream_wait(self) -> None:
        for result, values in self._late:
            result.copy_(values)


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 10 * hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    """Moves rows between the ranks of a group.

    Attributes:
        types: of tokens that can be moved; the package has bf16 alone.
    """

    num_sms = 20
    types: tuple[torch.dtype, ...] = (torch.bfloat16,)

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
    ) -> None:
        assert not low_latency_mode
        self.group, self.group_size = group, group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in RANKS, f"Unsupported number of EP ranks: {num_ranks}"
        return Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Buffer.get_dispatch_config(num_ranks)

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        assert topk_idx.dtype == torch.int64
        assert topk_idx.is_contiguous()
        assert num_experts % self.group_size == 0
        of_expert = torch.arange(num_experts)
        is_chosen_ne = (topk_idx.unsqueeze(-1) == of_expert).any(1)
        is_sent = is_chosen_ne.unflatten(1, (self.group_size, -1)).any(2)
        return sums(is_sent), None, sums(is_chosen_ne), is_sent, EventOverlap()

    def dispatch(
        self,
        x: Tensor,
        handle: tuple[Tensor, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        self._check_rows(x)
        if handle is not None:
            assert topk_idx is topk_weights is None
            is_sent, arriving = handle
            [rows] = self._sent(is_sent, arriving.tolist(), x)
            CALLS.append(("dispatch again", len(rows), False))
            [rows], event = later(async_finish, rows)
            return rows, None, None, None, None, event
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        assert topk_idx is not None
        assert topk_weights is not None
        self._check_weights(topk_weights)
        assert topk_idx.shape == topk_weights.shape
        assert (num_tokens_per_rank.dtype, num_tokens_per_expert.dtype) == (torch.int32,) * 2
        assert torch.equal(num_tokens_per_rank, sums(is_token_in_rank))
        arriving = torch.empty_like(num_tokens_per_rank)
        dist.all_to_all_single(arriving, num_tokens_per_rank, group=self.group)
        own = len(num_tokens_per_expert) // self.group_size
        rows, experts, weights = self._sent(
            is_token_in_rank, arriving.tolist(), x, topk_idx, topk_weights
        )
        experts = experts - self.group.rank() * own
        is_here = (experts >= 0) & (experts < own)
        experts, weights = experts.where(is_here, -1), weights.where(is_here, 0)
        times = [int((experts == expert).sum()) for expert in range(own)]
        CALLS.append(("dispatch", len(rows), True))
        handle = is_token_in_rank, arriving
        (rows, weights), event = later(async_finish, rows, self.weights_there(weights))
        return rows, experts, weights, times, handle, event

    def combine(
        self,
        x: Tensor,
        handle: tuple[Tensor, ...],
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        self._check_rows(x)
        is_sent, arriving = handle
        parts = [x]
        if topk_weights is not None:
            self._check_weights(topk_weights)
            assert len(topk_weights) == len(x)
            parts.append(self.weights_home(topk_weights))
        found = self._summed(is_sent, arriving.tolist(), *parts)
        CALLS.append(("combine", len(x), topk_weights is not None))
        found, event = later(async_finish, *found)
        return found[0], found[1] if topk_weights is not None else None, event

    def weights_there(self, weights: Tensor) -> Tensor:
        """The weights that arrive with tokens; a fault on purpose changes them."""
        return weights

    def weights_home(self, weights: Tensor) -> Tensor:
        """The gradients of weights that travel home; a fault on purpose changes them."""
        return weights

    def _check_rows(self, x: Tensor) -> None:
        assert x.dim() == 2
        assert x.is_contiguous()
        assert x.dtype in self.types, x.dtype

    def _check_weights(self, weights: Tensor) -> None:
        assert weights.is_contiguous()
        assert weights.dtype == torch.float32, weights.dtype

    def _sent(self, is_sent: Tensor, arriving: list[int], *tensors: Tensor) -> list[Tensor]:
        """The rows of tensors that arrive here, in the order of ranks and of tokens."""
        order, leaving = order_of(is_sent), sums(is_sent).tolist()
        return self._moved([each[order] for each in tensors], leaving, arriving)

    def _summed(self, is_sent: Tensor, arriving: list[int], *tensors: Tensor) -> list[Tensor]:
        """The sums of the rows of every token at its home, formed in fp32."""
        order, leaving = order_of(is_sent), sums(is_sent).tolist()
        found = []
        for rows in self._moved(tensors, arriving, leaving):
            wide = torch.zeros(len(is_sent), rows.shape[1], dtype=torch.float32)
            found.append(wide.index_add_(0, order, rows.float()).to(rows.dtype))
        return found

    def _moved(
        self, tensors: Sequence[Tensor], leaving: list[int], arriving: list[int]
    ) -> list[Tensor]:
        """The rows that the ranks have sent here; all tensors travel together."""
        rows = torch.cat([each.contiguous().view(torch.uint8) for each in tensors], 1)
        came = rows.new_empty((sum(arriving), rows.shape[1]))
        dist.all_to_all_single(came, rows, arriving, leaving, group=self.group)
        widths = [each.shape[1] * each.element_size() for each in tensors]
        # Copies, because views of one row may begin where no number of their type can.
        parts = [
            part.clone(memory_format=torch.contiguous_format) for part in came.split(widths, 1)
        ]
        return [part.view(each.dtype) for part, each in zip(parts, tensors, strict=True)]


class WideBuffer(Buffer):
    """As if the package moved fp32 too."""

    types = (torch.float32,)


def sums(flags: Tensor) -> Tensor:
    return flags.sum(0, dtype=torch.int32)


def order_of(is_sent: Tensor) -> Tensor:
    """The tokens of all rows that leave, by the rank to which they go."""
    return torch.cat([each.nonzero().flatten() for each in is_sent.T])


def later(is_late: bool, *results: Tensor) -> tuple[list[Tensor], EventOverlap]:
    """The results, and the event that they wait for."""
    if not is_late:
        return [*results], EventOverlap()
    unset = [torch.full_like(result, torch.nan) for result in results]
    return unset, EventOverlap([*zip(unset, results, strict=True)])


@contextmanager
def installed(
    buffer: type[Buffer] | None = Buffer, **named: Any
) -> Iterator[list[tuple[str, int, bool]]]:
    """Let the package be there; yield the calls that move rows.

    Args:
        buffer: its class; ``None``: it is missing.
        **named: other things in the package.
    """
    before = sys.modules.get("deep_ep")
    package: Any = ModuleType("deep_ep")
    if buffer is not None:
        package.Buffer = buffer
    vars(package).update({"__version__": "1.2.1", "topk_idx_t": torch.int64} | named)
    CALLS.clear()
    try:
        sys.modules["deep_ep"] = package
        yield CALLS
    finally:
        Buffer.num_sms = 20
        del sys.modules["deep_ep"]
        if before is not None:
            sys.modules["deep_ep"] = before
