"""The route of tokens to the slots of this rank's experts, and of the experts' results back.

A *slot* is a row of a rank's experts: one token, for one of the experts that it has chosen. The
tokens of a rank's slots come from all ranks that share the experts with it. The site's
``ExpertParallel`` brings them; this file joins its steps with the local order of slots
(``order.py``). ``dispatch`` and ``combine`` are each other's adjoint: each is the backward of the
other. The same holds for weights.

Shapes: b batch, u tokens of a sequence that a rank has outside of the layer, k choices of a token,
z slots of this rank, c choices that come to it, h any width, E experts of a layer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megatron.kernels.face import Kernels
from megatron.layers.experts.order import Order
from megatron.parallel.experts import (
    ExchangingExperts,
    ExpertParallel,
    GatheringExperts,
    Journey,
)


class Route(Protocol):
    """How the tokens of one microbatch come to the slots of this rank, and back.

    All ranks that share the experts call the methods in the same order.
    """

    @property
    def ends(self) -> Tensor:
        """The end of the slots of each of this rank's experts, int32; see ``Order``."""
        ...

    def known_to_host(self) -> "Route":
        """Return the route with ``ends`` on the host, which waits for the device."""
        ...

    @property
    def keeps_arrived(self) -> bool:
        """Whether W keeps slots; otherwise it keeps tokens, and dispatches them again."""
        ...

    def taken_apart(self) -> tuple[tuple[Tensor, ...], Callable[..., "Route"]]:
        """Return the tensors of the route, and a function that makes the route from them again.

        So autograd keeps the tensors, and recomputation can drop the tensors like any others.
        """
        ...

    def dispatch(self, x_buh: Tensor) -> Tensor:
        """Return the token of every slot, [z, h]."""
        ...

    def combine(self, y_zh: Tensor) -> Tensor:
        """Return the sums of all slots of this rank's tokens, on any rank, [b, u, h]."""
        ...

    @property
    def choices(self) -> Tensor:
        """For every slot the index of its weight among the weights that come here, int64 [z]."""
        ...

    def bring_weights(self, weights_buk: Tensor) -> Tensor:
        """Return the weights that come to this rank from all ranks, [c]."""
        ...

    def return_weights(self, y_c: Tensor) -> Tensor:
        """Return a number for every choice of this rank's tokens, [b, u, k]: sums over ranks.

        Args:
            y_c: a number for every weight that has come; it may be changed.
        """
        ...


def route_of(
    experts_buk: Tensor,
    experts: int,
    ranks: ExpertParallel,
    kernels: Kernels,
    kept_buk: Tensor | None = None,
    *,
    host_knows: bool = False,
) -> Route:
    """Return the route of a microbatch; all ranks that share the experts call it.

    Args:
        experts_buk: the experts that every token of this rank has chosen.
        experts: E.
        ranks: which ranks have which experts.
        kernels: of the layer.
        kept_buk: bool, the choices that are not dropped; ``None``: all. A dropped choice has no
            slot if the host waits for numbers of slots anyway, because experts are spread over
            ranks. Otherwise its slot stays, and the caller gives it the weight 0.
        host_knows: the ends of slots come to the host, which waits for the device.
    """
    route = _route_of(experts_buk, experts, ranks, kernels, kept_buk)
    return route.known_to_host() if host_knows else route


def _route_of(
    experts_buk: Tensor,
    experts: int,
    ranks: ExpertParallel,
    kernels: Kernels,
    kept_buk: Tensor | None,
) -> Route:
    drops = kept_buk is not None and ranks.size > 1
    groups = experts + drops  # dropped choices form the last group
    if kept_buk is not None and drops:
        experts_buk = experts_buk.where(kept_buk, experts)
    if isinstance(ranks, ExchangingExperts):
        return _exchange(Order.by_expert(experts_buk, groups, kernels), experts, ranks, kernels)
    experts_bsk, own = ranks.gather(experts_buk), ranks.own_experts(experts)
    if isinstance(ranks, GatheringExperts) and ranks.size > 1:
        from_own_bsk = (experts_bsk - own.start) % experts  # own ones first
        if drops:
            from_own_bsk = from_own_bsk.where(experts_bsk < experts, experts)
        order = Order.by_expert(from_own_bsk, groups, kernels)
        slots = ranks.own_slots(order.ends[len(own) - 1], len(order.choice_z))
        return Gathering(order.first(len(own), slots), ranks, kernels)
    return Gathering(Order.by_expert(experts_bsk, experts, kernels), ranks, kernels)


@dataclass(frozen=True, eq=False)
class Gathering:
    """A ``Route`` that gathers the tokens of all ranks; tokens of this rank's experts get slots.

    Attributes:
        order: the order of the slots.
        ranks: the ranks that have the tokens.
        kernels: kernels of the layer.
    """

    order: Order
    ranks: ExpertParallel
    kernels: Kernels

    @property
    def ends(self) -> Tensor:
        """See ``Route``."""
        return self.order.ends

    def known_to_host(self) -> Route:
        """See ``Route``."""
        return replace(self, order=self.order.known_to_host())

    @property
    def keeps_arrived(self) -> bool:
        """See ``Route``."""
        return self.ranks.keeps_arrived

    def taken_apart(self) -> tuple[tuple[Tensor, ...], Callable[..., Route]]:
        """See ``Route``."""
        ranks, kernels = self.ranks, self.kernels
        return tuple(self.order), lambda *tensors: Gathering(Order(*tensors), ranks, kernels)

    def dispatch(self, x_buh: Tensor) -> Tensor:
        """See ``Route``."""
        return self.order.spread(self.ranks.gather(x_buh), self.kernels)

    def combine(self, y_zh: Tensor) -> Tensor:
        """See ``Route``."""
        return self.ranks.reduce(self.order.join(y_zh, self.kernels))

    @property
    def choices(self) -> Tensor:
        """See ``Route``."""
        return self.order.choice_z

    def bring_weights(self, weights_buk: Tensor) -> Tensor:
        """See ``Route``."""
        return self.ranks.gather(weights_buk).flatten()

    def return_weights(self, y_c: Tensor) -> Tensor:
        """See ``Route``."""
        return self.ranks.reduce(y_c.view(self.order.slot_bsk.shape))


@dataclass(frozen=True, eq=False)
class Exchange:
    """A ``Route``: every token is sent to the ranks of its experts.

    Attributes:
        leaving: the order in which this rank's tokens leave, by expert of the layer.
        arrived: the order of the slots. Here a token is a row that has arrived, in one sample, and
            its only choice is the expert that it has come for.
        journey: how many rows go where.
        ranks: exchange the rows.
        kernels: of the layer.
    """

    leaving: Order
    arrived: Order
    journey: Journey
    ranks: ExchangingExperts
    kernels: Kernels

    keeps_arrived = True

    @property
    def ends(self) -> Tensor:
        """See ``Route``."""
        return self.arrived.ends

    def known_to_host(self) -> Route:
        """See ``Route``."""
        return replace(self, arrived=self.arrived.known_to_host())

    def taken_apart(self) -> tuple[tuple[Tensor, ...], Callable[..., Route]]:
        """See ``Route``."""
        journey, ranks, kernels = self.journey, self.ranks, self.kernels

        def again(*tensors: Tensor) -> Route:
            return Exchange(Order(*tensors[:3]), Order(*tensors[3:]), journey, ranks, kernels)

        return (*self.leaving, *self.arrived), again

    def dispatch(self, x_buh: Tensor) -> Tensor:
        """See ``Route``."""
        rows = self._sent(self.leaving.spread(x_buh, self.kernels))
        return self.arrived.spread(rows.unsqueeze(0), self.kernels)

    def combine(self, y_zh: Tensor) -> Tensor:
        """See ``Route``."""
        rows = self._home(self.arrived.choices_of(y_zh).flatten(0, 2))
        return self.leaving.join(rows, self.kernels)

    @property
    def choices(self) -> Tensor:
        """See ``Route``."""
        return self.arrived.choice_z

    def bring_weights(self, weights_buk: Tensor) -> Tensor:
        """See ``Route``."""
        return self._sent(self.leaving.slots_of(weights_buk))

    def return_weights(self, y_c: Tensor) -> Tensor:
        """See ``Route``."""
        return self.leaving.choices_of(self._home(y_c))

    def _sent(self, rows: Tensor) -> Tensor:
        return self.ranks.send_to_experts(rows, self.journey)

    def _home(self, rows: Tensor) -> Tensor:
        return self.ranks.send_home(rows, self.journey)


def _exchange(leaving: Order, experts: int, ranks: ExchangingExperts, kernels: Kernels) -> Exchange:
    """Return the route; ``leaving`` may have one more group than experts, that of no expert."""
    times_e = leaving.times[:experts]
    arriving = ranks.tell(times_e)
    journey = ranks.journey(times_e, arriving, len(leaving.choice_z))
    if len(leaving.ends) > experts:
        leaving = leaving.first(experts, sum(journey.sent))
    own = arriving.shape[-1]
    ends = arriving.flatten().cumsum(0)
    rows = torch.arange(journey.arrived, device=ends.device)
    # Rows come by place, and from each place by expert: so run i is of own expert i modulo ``own``.
    experts_1r1 = (torch.searchsorted(ends, rows, right=True) % own).view(1, -1, 1)
    arrived = Order.by_expert(experts_1r1, own, kernels)
    return Exchange(leaving, arrived, journey, ranks, kernels)
