"""Tokens travel to their experts by the package DeepEP: once to each rank that has any of them.

The package ``deep_ep`` (https://github.com/deepseek-ai/DeepEP) is optional. Its class ``Buffer`` is
called as version 1.2.1 publishes it; a missing function or argument is reported at the start. With
``alltoall`` (``experts.py``) a token travels once for every expert that it has chosen. Here a token
travels once for every rank, together with the numbers of its experts there and their weights. The
rank of the experts adds up what its experts make of a token, and sends one row back.

*Sending* is the package's ``dispatch``, *summing home* its ``combine``. Each is the other's
adjoint, so the backward of one is the other. The first sending of a microbatch makes a *handle*,
the plan of all its travels: later ones need no numbers from the host. Gradients of weights come
home together with those of tokens.

No method is differentiable, and every rank of the axis calls the methods in the same order.

Shapes: n tokens of this rank, r rows that arrive here (tokens of all ranks), h hidden, k choices of
a token.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from megatron.native.packages import fault_of_names
from megatron.parallel.experts import ExpertParallel
from megatron.parallel.groups import ConnectedAxis
from megatron.parallel.waits import waiting

Handle: TypeAlias = tuple[Tensor, ...]
"""The package's plan of travels; only the package looks into it."""

MOST_CHOICES: Final = 32
"""Experts of a token that the package's programs can count."""

MULTIPLE: Final = 16
"""The hidden size is a multiple: on Hopper the programs copy a row in two halves of 16 bytes each,
or a multiple of them."""

_CALLED: Final = {
    "__init__": "group num_nvl_bytes num_rdma_bytes",
    "set_num_sms": "new_num_sms",
    "get_dispatch_config": "num_ranks",
    "get_combine_config": "num_ranks",
    "get_dispatch_layout": "topk_idx num_experts",
    "dispatch": "x handle num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank "
    "num_tokens_per_expert topk_idx topk_weights async_finish",
    "combine": "x handle topk_weights async_finish",
}
"""The methods of ``Buffer`` that are called, with the names of the arguments that each gets."""


class Buffer(Protocol):
    """The methods of the package's ``Buffer`` that move tokens, as its documentation has them."""

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        """Return the facts about the choices that ``dispatch`` needs, by rank and by expert."""
        ...

    def dispatch(self, x: Tensor, handle: Handle | None = None, **named: Any) -> tuple[Any, ...]:
        """Send tokens to the ranks of their experts."""
        ...

    def combine(
        self,
        x: Tensor,
        handle: Handle,
        topk_weights: Tensor | None = None,
        *,
        async_finish: bool = False,
    ) -> tuple[Any, ...]:
        """Sum the rows of every token at its home."""
        ...


class Arrival(NamedTuple):
    """The tokens that have come to the experts of this rank.

    Attributes:
        x_rh: the tokens.
        experts_rk: int64, which of this rank's experts a token has chosen, counted from 0; -1 for
            a choice of an expert elsewhere.
        weights_rk: how much each choice counts; 0 where ``experts_rk`` is -1.
        times: how many tokens each of this rank's experts has; the host knows them.
        handle: for further travels of the same tokens.
    """

    x_rh: Tensor
    experts_rk: Tensor
    weights_rk: Tensor
    times: Sequence[int]
    handle: Handle


class VisitedExperts(ExpertParallel):
    """Experts are spread, and a token visits each rank that has any of its experts.

    Args:
        experts: the ranks that have different experts; no two share one.
        gradients: the ranks that have the same experts.
        buffer: of the package, for the ranks of ``experts``.
    """

    def __init__(self, experts: ConnectedAxis, gradients: ConnectedAxis, buffer: Buffer) -> None:
        self.rank, self.size = experts.rank, experts.size
        self.tensor_rank, self.tensor_size = 0, 1
        self.gradients = gradients
        self._turns, self._waits, self._buffer = experts.turns, experts.waits, buffer

    def send(self, x_nh: Tensor, experts_nk: Tensor, weights_nk: Tensor, experts: int) -> Arrival:
        """Send this rank's tokens to their experts.

        The host waits to learn how many tokens arrive.

        Args:
            x_nh: the tokens.
            experts_nk: int64, the experts that they have chosen; -1 for a choice that is dropped.
            weights_nk: fp32, how much each choice counts.
            experts: number of experts of the layer.
        """
        chosen_nk = experts_nk.contiguous()
        by_rank, by_machine, by_expert, is_sent, _ = self._buffer.get_dispatch_layout(
            topk_idx=chosen_nk, num_experts=experts
        )
        arrived = self._in_turns(
            self._buffer.dispatch,
            x_nh,
            topk_idx=chosen_nk,
            topk_weights=weights_nk.contiguous(),
            num_tokens_per_rank=by_rank,
            num_tokens_per_rdma_rank=by_machine,
            is_token_in_rank=is_sent,
            num_tokens_per_expert=by_expert,
        )
        return Arrival(*arrived)

    def send_again(self, x_nh: Tensor, handle: Handle) -> Tensor:
        """Return rows [r, h] that take the way of the tokens; the host does not wait."""
        rows: Tensor = self._in_turns(self._buffer.dispatch, x_nh, handle=handle)[0]
        return rows

    def sum_home(
        self, y_rh: Tensor, handle: Handle, weights_rk: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sums of all rows of each of this rank's tokens, [n, h].

        Args:
            y_rh: a row for every row that has arrived.
            handle: of the arrival.
            weights_rk: fp32, a number for every choice that has arrived, 0 for those of experts
                elsewhere; their sums [n, k] are returned too.
        """
        sums_nh, sums_nk = self._in_turns(
            self._buffer.combine, y_rh, handle=handle, topk_weights=weights_rk
        )
        return sums_nh, sums_nk

    def _in_turns(
        self, travel: Callable[..., tuple[Any, ...]], x: Tensor, **named: Any
    ) -> tuple[Any, ...]:
        """Return what ``travel`` returns before its event.

        In a pair the other pass goes on while the rows are under way.
        """
        if self._turns is None:
            with waiting(self._waits):
                return travel(x.contiguous(), **named)[:-1]
        *results, event = travel(x.contiguous(), async_finish=True, **named)
        self._turns.hand_over()
        with waiting(self._waits):
            event.current_stream_wait()
        return tuple(results)


def make_buffer(axis: ConnectedAxis, hidden_size: int, multiprocessors: int) -> Buffer:
    """Return the package's buffer for rows of 16 bits; all ranks of the axis call it.

    Args:
        axis: the ranks that have different experts.
        hidden_size: h.
        multiprocessors: of a GPU, that move tokens.

    Raises:
        ValueError: as in ``load_deep_ep``.
    """
    kind, ranks = load_deep_ep(axis.size), axis.size
    kind.set_num_sms(multiprocessors)
    settings = kind.get_dispatch_config(ranks), kind.get_combine_config(ranks)
    row = 2 * hidden_size
    near = max(each.get_nvl_buffer_size_hint(row, ranks) for each in settings)
    far = max(each.get_rdma_buffer_size_hint(row, ranks) for each in settings)
    buffer: Buffer = kind(axis.group, num_nvl_bytes=near, num_rdma_bytes=far)
    return buffer


def load_deep_ep(ranks: int) -> Any:
    """Return the package's class ``Buffer``.

    Args:
        ranks: over which experts are spread.

    Raises:
        ValueError: the package is not installed, does not load, lacks something, or has no
            settings for so many ranks.
    """
    try:
        package = import_module("deep_ep")
    except (ImportError, OSError, RuntimeError) as error:
        raise ValueError(f"the package deep_ep does not load here ({error})") from error
    kind = getattr(package, "Buffer", None)
    if kind is None:
        raise ValueError("the package deep_ep has no Buffer here")
    found = {name: getattr(kind, name, None) for name in _CALLED}
    if fault := fault_of_names(_CALLED, found):
        raise ValueError(f"Buffer of the package deep_ep is not as in version 1.2.1: {fault}")
    if getattr(package, "topk_idx_t", torch.int64) != torch.int64:
        raise ValueError("the package deep_ep was built with numbers of experts of 32 bits")
    try:
        kind.get_dispatch_config(ranks)
        kind.get_combine_config(ranks)
    except AssertionError as error:
        raise ValueError(
            f"the package deep_ep has no settings for {ranks} ranks ({error})"
        ) from error
    return kind
