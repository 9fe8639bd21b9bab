"""One linear layer of all experts as a grouped product, whose weight gradients can wait for W.

The first layer of the experts *spreads* tokens into slots (``route.py``), and the ranks that share
an expert cut this layer by its outputs. The second layer *joins* the slots of a token, and the
ranks cut it by its inputs. If experts are not spread over ranks, W keeps tokens in place of slots,
because tokens are fewer: for the first layer its input, for the second layer the gradient of its
output. If experts are spread over ranks, W keeps the slots, so that no token travels for W.

Shapes: b batch, u tokens of a sequence that a rank has outside of the layer, z slots of this rank,
e experts of this rank, i input features, o output features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from megatron.kernels.autograd import apply, once_differentiable
from megatron.layers.experts.route import Route
from megatron.layers.main_grad import has_main_grad, take_main_grad
from megatron.layers.site import Site
from megatron.layers.tensor_cut import Holding, OfExperts
from megatron.layers.weight_gradients import Defer

Way: TypeAlias = Literal["spreads", "joins"]
"""The layer turns tokens into slots (``spreads``), or slots into tokens (``joins``)."""


class GroupedLinear(nn.Module):
    """One matrix for each expert, and maybe one bias, which the caller adds (``biases.py``).

    The matrices lie one below the other in one parameter of the model, [e o, i], so that ranks and
    replicas can divide its rows like the rows of any matrix. Biases lie one after the other, [e o].
    If the layer joins, every rank has the biases of all experts of the layer.

    Args:
        experts: number of experts of the layer, on all ranks.
        in_features: i of the whole layer.
        out_features: o of the whole layer.
        way: the layer spreads, and ranks share its outputs; or it joins, and ranks share its
            inputs.
        site: device, dtype, ranks and kernels of the layer.
        fused: number of layers of equal size whose outputs lie one after the other.
        bias: whether there are biases.

    Attributes:
        holdings: how the ranks hold the parameters; see ``SaysHoldings``.
        defer: see ``DefersWeightGradients``.
    """

    defer: Defer | None = None

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        way: Way,
        site: Site,
        *,
        fused: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        ranks, own = site.experts, site.experts.own_experts(experts)
        self.experts, self.way, self.kernels = len(own), way, site.kernels
        outputs, inputs = out_features, in_features
        if way == "spreads":
            assert outputs % (ranks.tensor_size * fused) == 0, (outputs, ranks.tensor_size, fused)
            outputs //= ranks.tensor_size
        else:
            assert inputs % ranks.tensor_size == 0, (inputs, ranks.tensor_size)
            inputs //= ranks.tensor_size
        held = OfExperts(ranks, experts, dimension=int(way == "joins"), fused=fused)
        self.holdings: Mapping[str, Holding] = {"weight": held}
        weight_oi = torch.empty(len(own) * outputs, inputs, dtype=site.dtype, device=site.device)
        self.weight = nn.Parameter(weight_oi)
        self.bias: nn.Parameter | None = None
        if bias:
            length = len(weight_oi) if way == "spreads" else experts * outputs
            self.bias = nn.Parameter(weight_oi.new_empty(length))
            if way == "spreads":
                self.holdings = {"weight": held, "bias": held}
        self._keeps_first = way == "joins" and site.recomputation.repeats_products

    @property
    def deferred(self) -> Sequence[Tensor]:
        """See ``DefersWeightGradients``."""
        return (self.weight,)

    def forward(self, x: Tensor, route: Route) -> Tensor:
        """Multiply every slot by the matrix of its expert.

        Args:
            x: tokens [b, u, i] if the layer spreads, else slots [z, i].
            route: of the tokens to this rank's slots.

        Returns:
            Slots [z, o] if the layer spreads, else tokens [b, u, o].
        """
        defer = self.defer if self.weight.requires_grad else None
        early = None
        if self._keeps_first and self.weight.requires_grad:
            # The slots are kept before the product, so that recomputation can end before it.
            early = list[Any]()
            x = apply(_KeptSlots, x, route, early)
        return apply(_GroupedLinear, x, self.weight, route, early, self, defer)


class _KeptSlots(torch.autograd.Function):
    """Keeps slots and route for a ``_GroupedLinear`` that joins, before its product is formed."""

    @staticmethod
    def forward(ctx: Any, x_zi: Tensor, route: Route, early: list[Any]) -> Tensor:
        tensors, _ = route.taken_apart()
        ctx.save_for_backward(x_zi, *tensors)
        early.append(ctx)
        return x_zi.view_as(x_zi)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None


class _GroupedLinear(torch.autograd.Function):
    """The products of a ``GroupedLinear``, and a backward that can be split."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        route: Route,
        early: list[Any] | None,
        layer: GroupedLinear,
        defer: Defer | None,
    ) -> Tensor:
        ctx.weight, ctx.layer, ctx.defer = weight, layer, defer
        tensors, ctx.route_of = route.taken_apart()
        spreads = layer.way == "spreads"
        x_zi = route.dispatch(x) if spreads else x
        ctx.keeper = early[0] if early else None  # not ctx itself: a cycle outlives its pass
        if not early:
            ctx.save_for_backward(x_zi if route.keeps_arrived else x, *tensors)
        matrices_eio = weight.unflatten(0, (layer.experts, -1)).transpose(1, 2)
        y_zo = layer.kernels.grouped_product(x_zi, matrices_eio, route.ends)
        return y_zo if spreads else route.combine(y_zo)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer, weight, spreads = ctx.layer, ctx.weight, ctx.layer.way == "spreads"
        saved = (ctx.keeper or ctx).saved_tensors
        x, *of_route = (tensor.detach() for tensor in saved)
        route, grad = ctx.route_of(*of_route), grad.contiguous()
        grad_zo = grad if spreads else route.dispatch(grad)
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            matrices_eoi = weight.detach().unflatten(0, (layer.experts, -1))
            x_grad = layer.kernels.grouped_product(grad_zo, matrices_eoi, route.ends)
            x_grad = route.combine(x_grad) if spreads else x_grad
        factors = _Factors(layer, route, grad_zo if route.keeps_arrived else grad, x)
        if ctx.defer is not None:
            ctx.defer(factors.add_product)
        elif ctx.needs_input_grad[1]:
            now = _Factors(layer, route, grad_zo, factors.x_of_slots(), of_slots=True)
            if has_main_grad(weight):
                now.add_product()
            else:
                weight_grad = now.product()
        return x_grad, weight_grad, None, None, None, None


@dataclass(frozen=True, eq=False)
class _Factors:
    """The factors of a weight gradient.

    Attributes:
        layer: whose weight it is.
        route: of the layer's tokens.
        grad: gradient of the layer's outputs.
        x: the layer's inputs.
        of_slots: whether both have a row for every slot. Otherwise they are as W keeps them: with
            rows of slots, or with rows of tokens where the layer has tokens and the route does not
            keep the rows that have arrived.
    """

    layer: GroupedLinear
    route: Route
    grad: Tensor
    x: Tensor
    of_slots: bool = False

    def product(self) -> Tensor:
        """Return the gradient of the matrices, [e o, i]."""
        kernels, ends = self.layer.kernels, self.route.ends
        factors = self._grad_of_slots(), self.x_of_slots()
        return kernels.grouped_weight_product(*factors, ends).flatten(0, 1)

    def add_product(self) -> None:
        """Add the gradient of the matrices to the weight's ``main_grad``."""
        layer, factors = self.layer, (self._grad_of_slots(), self.x_of_slots())
        total, begins = take_main_grad(layer.weight)
        total_eoi = total.unflatten(0, (layer.experts, -1))
        layer.kernels.accumulate_grouped_product_(
            total_eoi, *factors, self.route.ends, begins=begins
        )

    def x_of_slots(self) -> Tensor:
        """Return the inputs of every slot, [z, i]."""
        has_tokens = self.layer.way == "spreads" and not self._is_of_slots
        return self.route.dispatch(self.x) if has_tokens else self.x

    def _grad_of_slots(self) -> Tensor:
        has_tokens = self.layer.way == "joins" and not self._is_of_slots
        return self.route.dispatch(self.grad) if has_tokens else self.grad

    @property
    def _is_of_slots(self) -> bool:
        return self.of_slots or self.route.keeps_arrived
