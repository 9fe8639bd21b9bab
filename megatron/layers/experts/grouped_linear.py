"""One linear layer of all experts as a grouped product, whose weight gradients can wait for W.

The first layer of the experts *spreads* tokens into slots (``route.py``), and the ranks that share
an expert cut this layer by its outputs. The second layer *joins* the slots of a token, and the
ranks cut it by its inputs. If experts are not spread over ranks, W keeps tokens in place of slots,
because tokens are fewer: for the first layer its input, for the second layer the gradient of its
output. If experts are spread over ranks, W keeps the slots, so that no token travels for W. How
slots are multiplied, and in which form W keeps them, is up to a strategy (``grouped_products.py``).

Shapes: b batch, u tokens of a sequence that a rank has outside of the layer, z slots of this rank,
e experts of this rank, i input features, o output features.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from megatron.kernels.autograd import apply, once_differentiable
from megatron.layers.experts.grouped_products import (
    GroupedProducts,
    PlainGroupedProducts,
)
from megatron.layers.experts.route import Route
from megatron.layers.main_grad import has_main_grad, take_main_grad
from megatron.layers.products import Kept
from megatron.layers.scales import GRADIENT, INPUT, Role
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
        products: how the layer multiplies; by default in the dtype of the activations.
        all_experts: number of experts of the layer, on all ranks.
        own_experts: the experts of this rank.
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
        self.all_experts, self.own_experts = experts, own
        self.experts, self.way = len(own), way
        self.products: GroupedProducts = PlainGroupedProducts(site.grouped_kernels)
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

    def matrices(self, weight: Tensor) -> Tensor:
        """Return the weight, or its gradient, as a matrix for each expert, [e, o, i]."""
        matrices_eoi: Tensor = weight.unflatten(0, (self.experts, -1))
        return matrices_eoi

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
            x = apply(_KeptSlots, x, route, early, self)
        return apply(_GroupedLinear, x, self.weight, route, early, self, defer)


class _KeptSlots(torch.autograd.Function):
    """Keeps slots and route for a ``_GroupedLinear`` that joins, before its product is formed."""

    @staticmethod
    def forward(
        ctx: Any, x_zi: Tensor, route: Route, early: list[Any], layer: GroupedLinear
    ) -> Tensor:
        tensors, _ = route.taken_apart()
        factor, kept = layer.products.factor(INPUT, x_zi, route.ends, keeps=True)
        ctx.save_for_backward(*tensors, *kept)
        early += ctx, factor
        return x_zi.view_as(x_zi)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None


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
        ctx.of_route = len(tensors)
        spreads = layer.way == "spreads"
        ctx.keeper = None  # not ctx itself: a cycle outlives its pass
        if early:
            ctx.keeper, factor = early
        else:
            keeps = not spreads or route.keeps_arrived
            slots = route.dispatch(x) if spreads else x
            factor, kept = layer.products.factor(INPUT, slots, route.ends, keeps=keeps)
            ctx.save_for_backward(*tensors, *(kept if keeps else (x,)))
            del slots  # a factor in 8 bits does not need them
        y_zo = layer.products.output(factor, layer.matrices(weight))
        return y_zo if spreads else route.combine(y_zo)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer, weight, spreads = ctx.layer, ctx.weight.detach(), ctx.layer.way == "spreads"
        saved = [tensor.detach() for tensor in (ctx.keeper or ctx).saved_tensors]
        kept = tuple(saved[ctx.of_route :])
        route, grad = ctx.route_of(*saved[: ctx.of_route]), grad.contiguous()
        grad_zo = grad if spreads else route.dispatch(grad)
        x_grad = weight_grad = None
        waits, now = ctx.defer is not None, ctx.defer is None and ctx.needs_input_grad[1]
        keeps = waits and (spreads or route.keeps_arrived)
        factor, kept_grad = layer.products.factor(GRADIENT, grad_zo, route.ends, keeps=keeps or now)
        del grad_zo  # as the slots of the forward
        if ctx.needs_input_grad[0]:
            x_grad = layer.products.input_gradient(factor, layer.matrices(weight))
            x_grad = route.combine(x_grad) if spreads else x_grad
        x = _Waiting(INPUT, kept, of_slots=not spreads or route.keeps_arrived)
        if waits:
            wanted = _Waiting(GRADIENT, kept_grad if keeps else (grad,), of_slots=keeps)
            ctx.defer(_later(layer, route, wanted, x))
        elif now:
            of_input = x.factor(layer.products, route)
            if has_main_grad(ctx.weight):
                _add_product(layer, factor, of_input)
            else:
                product_eoi = layer.products.weight_gradient(factor, of_input)
                weight_grad = product_eoi.flatten(0, 1)
        return x_grad, weight_grad, None, None, None, None


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A factor of a weight gradient, as it waits for W.

    Attributes:
        role: the layer's input, or the gradient of its output.
        kept: the parts of the slots that ``GroupedProducts`` keeps, or the tokens alone.
        of_slots: whether ``kept`` has parts of slots.
    """

    role: Role
    kept: Kept
    of_slots: bool

    def factor(self, products: GroupedProducts, route: Route) -> Any:
        """Return the factor for W's product; kept tokens are first sent to their slots again."""
        if self.of_slots:
            return products.again(self.role, self.kept, route.ends)
        return products.for_weight(self.role, route.dispatch(self.kept[0]), route.ends)


def _later(layer: GroupedLinear, route: Route, grad: _Waiting, x: _Waiting) -> Callable[[], None]:
    """Return the work of W."""

    def work() -> None:
        products = layer.products
        _add_product(layer, grad.factor(products, route), x.factor(products, route))

    return work


def _add_product(layer: GroupedLinear, grad: Any, x: Any) -> None:
    """Add the gradient of the matrices to the weight's ``main_grad``, given its factors."""
    total, begins = take_main_grad(layer.weight)
    layer.products.accumulate_(layer.matrices(total), grad, x, begins=begins)
