"""One linear layer of all experts as a grouped product, whose weight gradients can wait for W.

The first layer of the experts *spreads* tokens into slots (``order.py``), and tensor-parallel ranks
cut this layer by its outputs. The second layer *joins* the slots of a token, and the ranks cut it
by its inputs. For W a layer keeps tokens in place of slots where it can, because tokens are fewer:
the first layer keeps its input so, the second layer the gradient of its output.

Shapes: b batch, s tokens of a sequence, u tokens of it that a rank has outside of the layer, z
slots, e experts, i input features, o output features.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from megatron.kernels.autograd import apply, once_differentiable
from megatron.layers.experts.order import Order
from megatron.layers.main_grad import has_main_grad, take_main_grad
from megatron.layers.site import Site
from megatron.layers.tensor_cut import Cut, Holding
from megatron.layers.weight_gradients import Defer

Way: TypeAlias = Literal["spreads", "joins"]
"""The layer turns tokens into slots (``spreads``), or slots into tokens (``joins``)."""


class GroupedLinear(nn.Module):
    """One matrix for each expert, without biases.

    The matrices lie one below the other in one parameter of the model, [e o, i], so that ranks and
    replicas can divide its rows like the rows of any matrix.

    Args:
        experts: e.
        in_features: i of the whole layer.
        out_features: o of the whole layer.
        way: the layer spreads, and ranks share its outputs; or it joins, and ranks share its
            inputs.
        site: device, dtype, ranks and kernels of the layer.
        fused: number of layers of equal size whose outputs lie one after the other.

    Attributes:
        holdings: how the ranks hold the weight; see ``SaysHoldings``.
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
    ) -> None:
        super().__init__()
        self.experts, self.way, self.kernels = experts, way, site.kernels
        self._tensor, ranks = site.tensor, site.tensor.size
        outputs, inputs = out_features, in_features
        self.holdings: Mapping[str, Holding] = {}
        if ranks > 1 and way == "spreads":
            assert outputs % (ranks * fused) == 0, (outputs, ranks, fused)
            outputs //= ranks
            self.holdings = {"weight": Cut(0, experts * fused)}
        elif ranks > 1:
            assert inputs % ranks == 0, (inputs, ranks)
            inputs //= ranks
            self.holdings = {"weight": Cut(1)}
        weight_oi = torch.empty(experts * outputs, inputs, dtype=site.dtype, device=site.device)
        self.weight = nn.Parameter(weight_oi)

    @property
    def deferred(self) -> Sequence[Tensor]:
        """See ``DefersWeightGradients``."""
        return (self.weight,)

    def forward(self, x: Tensor, order: Order) -> Tensor:
        """Multiply every slot by the matrix of its expert.

        Args:
            x: tokens [b, u, i] if the layer spreads, else slots [z, i].
            order: of the tokens of all tensor-parallel ranks.

        Returns:
            Slots [z, o] if the layer spreads, else tokens [b, u, o].
        """
        defer = self.defer if self.weight.requires_grad else None
        return apply(_GroupedLinear, x, self.weight, order, self, defer)

    def slots(self, of_tokens: Tensor, order: Order) -> Tensor:
        """Gather the tokens [b, u, ...] of all tensor-parallel ranks; return slots [z, ...]."""
        return order.spread(self._tensor.gather(of_tokens), self.kernels)

    def tokens(self, of_slots: Tensor, order: Order) -> Tensor:
        """Sum the slots of every token over the tensor-parallel ranks; return [b, u, ...]."""
        return self._tensor.reduce(order.join(of_slots, self.kernels))


class _GroupedLinear(torch.autograd.Function):
    """The products of a ``GroupedLinear``, and a backward that can be split."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, order: Order, layer: GroupedLinear, defer: Defer | None
    ) -> Tensor:
        ctx.save_for_backward(x, *order)
        ctx.weight, ctx.layer, ctx.defer = weight, layer, defer
        spreads = layer.way == "spreads"
        x_zi = layer.slots(x, order) if spreads else x
        matrices_eio = weight.unflatten(0, (layer.experts, -1)).transpose(1, 2)
        y_zo = layer.kernels.grouped_product(x_zi, matrices_eio, order.ends)
        return y_zo if spreads else layer.tokens(y_zo, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer, weight, defer = ctx.layer, ctx.weight, ctx.defer
        x, *in_order = (tensor.detach() for tensor in ctx.saved_tensors)
        order, grad, spreads = Order(*in_order), grad.contiguous(), layer.way == "spreads"
        grad_zo = grad if spreads else layer.slots(grad, order)
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            matrices_eoi = weight.detach().unflatten(0, (layer.experts, -1))
            x_grad = layer.kernels.grouped_product(grad_zo, matrices_eoi, order.ends)
            x_grad = layer.tokens(x_grad, order) if spreads else x_grad
        if defer is not None:
            defer(_weight_gradient(layer, weight, grad, x, order))
        elif ctx.needs_input_grad[1]:
            x_zi = layer.slots(x, order) if spreads else x
            if has_main_grad(weight):
                _add_product(layer, weight, grad_zo, x_zi, order)
            else:
                product_eoi = layer.kernels.grouped_weight_product(grad_zo, x_zi, order.ends)
                weight_grad = product_eoi.flatten(0, 1)
        return x_grad, weight_grad, None, None, None


def _add_product(
    layer: GroupedLinear, weight: Tensor, grad_zo: Tensor, x_zi: Tensor, order: Order
) -> None:
    """Add the gradient of the matrices to the weight's ``main_grad``."""
    total, begins = take_main_grad(weight)
    total_eoi = total.unflatten(0, (layer.experts, -1))
    layer.kernels.accumulate_grouped_product_(total_eoi, grad_zo, x_zi, order.ends, begins=begins)


def _weight_gradient(
    layer: GroupedLinear, weight: Tensor, grad: Tensor, x: Tensor, order: Order
) -> Callable[[], None]:
    """Return the work of W; it keeps only its two factors and the order alive."""

    def work() -> None:
        spreads = layer.way == "spreads"
        grad_zo = grad if spreads else layer.slots(grad, order)
        x_zi = layer.slots(x, order) if spreads else x
        _add_product(layer, weight, grad_zo, x_zi, order)

    return work
