"""Tokens of all ranks visit the experts of this rank, if the package DeepEP moves them.

With the other dispatchers a ``Route`` moves rows of slots between ranks. Here whole tokens travel
first, with the choices that concern this rank (``megatron.parallel.deep_ep``). Then this rank is as
one that has all experts: the tokens get their slots by a ``Route`` of this rank alone, and the sums
of a token's slots travel home. So nothing travels for W, which keeps tokens instead of slots.

Shapes: b batch, u tokens of a sequence that a rank has outside of the layer, n = b u tokens, r rows
that arrive, k choices of a token, h hidden.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.autograd import apply, apply_all, once_differentiable
from megatron.kernels.face import Kernels
from megatron.layers.experts.order import Order
from megatron.layers.experts.route import Gathering, Route
from megatron.layers.experts.router import Choice
from megatron.layers.recompute import KeptInGraph
from megatron.parallel.deep_ep import Arrival, Handle, VisitedExperts
from megatron.parallel.experts import ExpertParallel
from megatron.parallel.tensor import ALONE


def at_the_experts(
    run: Callable[[Tensor, Tensor, Route], Tensor],
    x_buh: Tensor,
    choice: Choice,
    experts: int,
    ranks: VisitedExperts,
    kernels: Kernels,
    *,
    host_knows: bool = False,
) -> Tensor:
    """Return the results of the experts of all ranks for this rank's tokens, [b, u, h].

    Args:
        run: computes this rank's experts, given tokens [1, r, h], weights of their choices
            [1, r, k], and the route to this rank's slots; returns [1, r, h].
        x_buh: the tokens of this rank.
        choice: the experts that they have chosen.
        experts: number of experts of the layer.
        ranks: which ranks have which experts.
        kernels: of the layer.
        host_knows: the ends of slots are on the host; see ``route_of``.
    """
    experts_buk, weights_buk, kept_buk = choice
    if kept_buk is not None:
        experts_buk = experts_buk.where(kept_buk, -1)
    arrived: list[Arrival] = []
    x_rh, weights_rk = apply_all(
        _Sent,
        x_buh.flatten(0, 1),
        weights_buk.flatten(0, 1),
        experts_buk.flatten(0, 1),
        experts,
        ranks,
        arrived,
    )
    [arrival] = arrived
    # The handle is kept before the experts' products, so that computing again can end before them.
    kept = KeptInGraph(*arrival.handle)
    route = _route(arrival, len(ranks.own_experts(experts)), kernels, host_knows=host_knows)
    y_1rh = run(x_rh.unsqueeze(0), weights_rk.unsqueeze(0), route)
    y_nh = apply(_SummedHome, y_1rh.flatten(0, 1), ranks, arrival.handle, kept)
    return y_nh.view(x_buh.shape)


def _route(arrival: Arrival, own: int, kernels: Kernels, *, host_knows: bool) -> Route:
    """Return the route of the tokens that have arrived to the slots of this rank's experts."""
    experts_1rk, times = arrival.experts_rk.unsqueeze(0), arrival.times
    groups_1rk = experts_1rk.where(experts_1rk >= 0, own)  # choices of others form the last group
    order = Order.by_expert(groups_1rk, own + 1, kernels).first(own, sum(times))
    if host_knows:
        order = order._replace(ends=torch.tensor([*accumulate(times)], dtype=torch.int32))
    return Gathering(order, ExpertParallel(ALONE), kernels)


class _Sent(torch.autograd.Function):
    """Tokens and weights at the ranks of the experts; the backward sums gradients at home."""

    @staticmethod
    def forward(
        ctx: Any,
        x_nh: Tensor,
        weights_nk: Tensor,
        experts_nk: Tensor,
        experts: int,
        ranks: VisitedExperts,
        arrived: list[Arrival],
    ) -> tuple[Tensor, Tensor]:
        arrival = ranks.send(x_nh, experts_nk, weights_nk, experts)
        ctx.ranks = ranks
        ctx.save_for_backward(*arrival.handle)
        arrived.append(arrival)
        return arrival.x_rh, arrival.weights_rk

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rh: Tensor, grad_rk: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, weights_grad = ctx.ranks.sum_home(grad_rh, ctx.saved_tensors, grad_rk.contiguous())
        return x_grad, weights_grad, None, None, None, None


class _SummedHome(torch.autograd.Function):
    """The sums of every token's rows at its home; the backward sends gradients to the experts."""

    @staticmethod
    def forward(
        ctx: Any, y_rh: Tensor, ranks: VisitedExperts, handle: Handle, kept: KeptInGraph
    ) -> Tensor:
        ctx.ranks, ctx.kept = ranks, kept
        sums_nh, _ = ranks.sum_home(y_rh, handle)
        return sums_nh

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_nh: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.ranks.send_again(grad_nh, ctx.kept.read()), None, None, None
