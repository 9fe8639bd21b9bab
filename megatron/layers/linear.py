"""Linear layers whose backward can be split into a part for B and a part that W does later.

The previous stage waits only for the input gradient. If a schedule has W passes, the other product
of the backward, output gradient times input, is handed out as a closure. The closure runs in a W
pass (zero bubble, arXiv 2401.10241, section 2). ``megatron.model.init`` sets the weights.

Tensor-parallel ranks share a layer in two ways (arXiv 1909.08053, section 3). In a
*column-parallel* layer each rank forms some of the outputs, for all tokens. The tokens are gathered
before the product, and the input's gradient is reduced. In a *row-parallel* layer each rank has
some of the input features. The product is reduced, and the output's gradient is gathered. For the
backward a rank keeps only its own tokens, and gathers the others again.

Shapes: ``...`` any leading dimensions, n their product, i input features, o output features; with
tensor parallelism b batch, s tokens of a sequence, u tokens of it that a rank has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron.kernels.autograd import apply, once_differentiable
from megatron.layers.main_grad import has_main_grad, take_main_grad
from megatron.layers.products import Kept, PlainProducts, Products, rows, whole_of
from megatron.layers.site import Site
from megatron.layers.tensor_cut import Cut, Holding
from megatron.layers.weight_gradients import Defer
from megatron.parallel.lanes import Pending
from megatron.parallel.tensor import ALONE

Way: TypeAlias = Literal["columns", "rows"]
"""Ranks divide a layer's outputs (``columns``), or its inputs (``rows``)."""


@dataclass(frozen=True)
class FactoredInput:
    """An input that is already a factor (see ``Products``) of one linear layer.

    Attributes:
        placeholder: stands for the input [..., i] in autograd's graph; its values are never read.
        factor: the input in the form that the layer multiplies.
        kept: tensors to keep for the weight's gradient.
        products: the layer's strategy, which has made the factor; other layers cannot use it.
    """

    placeholder: Tensor
    factor: Any
    kept: Kept
    products: Products[Any]


LinearInput: TypeAlias = Tensor | FactoredInput
"""The input of a linear layer."""


class Linear(nn.Linear):
    """``torch.nn.Linear`` that ranks may share, and that can leave its weight gradient for later.

    Args:
        in_features: i of the whole layer.
        out_features: o of the whole layer.
        site: device, dtype, ranks and kernels of the layer.
        bias: whether the layer has a bias.
        parallel: the site's tensor-parallel ranks divide the outputs (``columns``) or the inputs
            (``rows``); ``None``: every rank has the whole layer.
        fused: number of layers of equal size whose outputs lie one after the other; ranks cut each
            of them.

    Attributes:
        holdings: how the ranks hold the parameters; see ``SaysHoldings``.
        defer: see ``DefersWeightGradients``. If ``None``, the backward itself adds the weight's
            gradient to ``weight.main_grad``, if the kernels can add within the product.
        products: how the layer multiplies; by default in the dtype of the activations.
    """

    defer: Defer | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        site: Site,
        *,
        bias: bool,
        parallel: Way | None = None,
        fused: int = 1,
    ) -> None:
        columns = site.tensor if parallel == "columns" else ALONE
        rows = site.tensor if parallel == "rows" else ALONE
        assert in_features % rows.size == 0, f"{in_features} inputs for {rows.size} ranks"
        assert out_features % (columns.size * fused) == 0, (out_features, columns.size, fused)
        super().__init__(
            in_features // rows.size,
            out_features // columns.size,
            bias=bias,
            device=site.device,
            dtype=site.dtype,
        )
        self.holdings: Mapping[str, Holding] = {}
        if columns.size > 1:
            self.holdings = {"weight": Cut(0, fused), "bias": Cut(0, fused)}
        elif rows.size > 1:
            self.holdings = {"weight": Cut(1)}
        self.columns, self.rows = columns, rows
        self.products: Products[Any] = PlainProducts(site.kernels)
        self._keeps_first = site.recomputation.repeats_products

    def reset_parameters(self) -> None:
        """Do nothing: ``megatron.model.init`` sets the values."""

    def forward(self, x: LinearInput, *, forms_bias_gradient: bool = True) -> Tensor:
        """[..., i] -> [..., o] of this rank; [b, u, i] -> [b, s, o] or back if ranks share it.

        Args:
            x: the input, or a factor of it.
            forms_bias_gradient: whether the backward forms the bias's gradient; if not, the reader
                of the output must form it.
        """
        weight, factored, early = self.weight, None, None
        bias: Tensor | None = self.bias
        if bias is not None and not forms_bias_gradient:
            bias = bias.detach()
        defer = self.defer if weight.requires_grad else None
        adds = defer is None and self._adds_gradient_of(weight)
        by_autograd = defer is None and not adds
        alone = self.columns.size == self.rows.size == 1
        if isinstance(x, FactoredInput):
            assert x.products is self.products, "a factor of another layer"
            x, factored = x.placeholder, x
        elif by_autograd and alone and self.products.are_autograds:
            return functional.linear(x, weight, bias)
        elif self._keeps_first and weight.requires_grad:
            # The input is kept before the product, so that recomputation can end before it.
            early = list[Any]()
            x = apply(_KeptInput, x, weight, early, self)
        # If autograd need not form the weight's gradient, the weight stays out of the graph. The
        # input must then require a gradient, or the backward would not run.
        known = weight if by_autograd or not x.requires_grad else None
        return apply(_SharedLinear, x, known, bias, early, factored, self, defer, adds)

    def joined(self, parts: Sequence[Tensor]) -> LinearInput:
        """Return the input that parts along the sequence make, without keeping it beside the parts.

        Whoever made the parts keeps them for its own backward. So the layer keeps the same parts,
        and joins them again in its backward.

        Args:
            parts: [b, u, i] each, of consecutive tokens; together the input of this rank.
        """
        x = whole_of(parts)
        if len(parts) == 1 or not self.products.keeps_parts:
            return x
        factor, _ = self.products.of_input(x.detach(), self.columns)
        kept = tuple(part.detach() for part in parts)
        return FactoredInput(x, factor, kept, self.products)

    @property
    def deferred(self) -> tuple[Tensor]:
        """The weight, whose gradient W forms. B forms the gradient of the bias."""
        return (self.weight,)

    def _adds_gradient_of(self, weight: Tensor) -> bool:
        """Return whether the backward adds the weight's gradient to its sum within the product."""
        return self.products.accumulates and weight.requires_grad and has_main_grad(weight)

    if TYPE_CHECKING:  # PyTorch types the call of a module as returning Any

        def __call__(self, x: LinearInput, *, forms_bias_gradient: bool = True) -> Tensor:
            """See ``forward``."""


class _SharedLinear(torch.autograd.Function):
    """``functional.linear`` with communication around it, and a backward that can be split.

    A split backward forms the same products as a whole one, so both give the same bits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        known: Tensor | None,
        bias: Tensor | None,
        early: list[Any] | None,
        factored: FactoredInput | None,
        layer: Linear,
        defer: Defer | None,
        adds: bool,
    ) -> Tensor:
        """Return the output.

        ``known`` is the layer's weight for autograd's graph; ``None``: autograd does not form the
        weight's gradient.
        """
        keeper = None
        if early:
            keeper, factor = early
        elif factored is not None:
            factor = factored.factor
            ctx.save_for_backward(*factored.kept)
        else:
            factor, kept = layer.products.of_input(x, layer.columns)
            ctx.save_for_backward(*kept)
        # The weight is no saved tensor: recomputation replaces a saved tensor by another tensor,
        # which is not the parameter and has no ``main_grad``.
        ctx.weight = weight = layer.weight
        ctx.keeper, ctx.layer, ctx.defer, ctx.adds = keeper, layer, defer, adds
        if layer.rows.size == 1:
            y = layer.products.output(factor, weight, bias)
            layer.columns.pause()
            return y
        # The bias comes after the sum, or every rank would add it.
        y = layer.rows.reduce(layer.products.output(factor, weight, None))
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer, weight, defer, adds = ctx.layer, ctx.weight, ctx.defer, ctx.adds
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad = grad.contiguous()  # one copy here instead of one for each use
        bias_grad = rows(grad).sum(0) if needs_bias else None
        saved = (ctx.keeper or ctx).saved_tensors  # autograd refuses tensors that have changed
        kept = tuple(tensor.detach() for tensor in saved)  # lets W run without the input's graph
        factor, kept_grad = layer.products.of_gradient(grad, layer.rows)
        if defer is not None:
            defer(_WeightGradient(layer, weight, kept_grad, kept))
        wanted = kept if adds or (needs_weight and defer is None) else None
        x_grad, weight_grad = _products(layer, weight, factor, wanted, wants_x=needs_x, adds=adds)
        layer.rows.pause()
        return x_grad, weight_grad, bias_grad, None, None, None, None, None


class _KeptInput(torch.autograd.Function):
    """Keeps the input for a ``_SharedLinear``, before the product is formed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, early: list[Any], layer: Linear) -> Tensor:
        factor, kept = layer.products.of_input(x, layer.columns)
        ctx.save_for_backward(*kept)
        early += ctx, factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None


def _products(
    layer: Linear, weight: Tensor, grad: Any, kept: Kept | None, *, wants_x: bool, adds: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the input's gradient if ``wants_x``, and the weight's gradient if ``kept`` is given.

    With ``adds`` the weight's gradient is added to its sum, and not returned. The input is gathered
    again during the product of its gradient, and its gradient is reduced during the product of the
    weight's gradient. Without this product the pass waits for the reduction. In a pair, the other
    pass has its turn when the reduction has begun.
    """
    x_grad = weight_grad = None
    products = layer.products
    coming = None if kept is None else products.start_input_again(kept, layer.columns)
    if wants_x:
        x_grad = products.input_gradient(grad, weight)
    # After the product, which hides the gathering, and before the reduction: nothing else may call
    # the ranks while a gathering is under way (``TensorParallel.start_gather``).
    if coming is None:
        return None if x_grad is None else layer.columns.reduce(x_grad), None
    x = coming.wait()
    leaving = layer.columns.start_reduction(x_grad) if x_grad is not None else None
    if adds:
        _add_product(layer, weight, grad, x)
    else:
        weight_grad = products.weight_gradient(grad, x)
    return leaving.wait() if leaving else None, weight_grad


def _add_product(layer: Linear, weight: Tensor, grad: Any, x: Any) -> None:
    """Add the gradient of the weight to its sum."""
    total, begins = take_main_grad(weight)
    layer.products.accumulate_(total, grad, x, begins=begins)


class _WeightGradient:
    """The work of W for a layer; of the graph it keeps only the two factors of its product alive.

    Each factor is kept for the tokens that this rank has outside of attention and MLP, and gathered
    again for the product. See ``GathersFirst``.
    """

    def __init__(self, layer: Linear, weight: Tensor, grad: Kept, x: Kept) -> None:
        self._layer, self._weight, self._grad, self._x = layer, weight, grad, x
        self._versions = [tensor._version for tensor in (*grad, *x)]
        self._coming: tuple[Pending[Any], Pending[Any]] | None = None
        self._factors: tuple[Any, Any] | None = None

    def begin(self) -> None:
        products, layer = self._layer.products, self._layer
        versions = [tensor._version for tensor in (*self._grad, *self._x)]
        assert self._versions == versions, (
            "a factor of a deferred weight gradient was changed in place between B and W"
        )
        self._coming = (
            products.start_gradient_again(self._grad, layer.rows),
            products.start_input_again(self._x, layer.columns),
        )

    def arrive(self) -> None:
        if self._factors is None:
            if self._coming is None:
                self.begin()
            assert self._coming is not None
            grad, x = self._coming
            self._factors = grad.wait(), x.wait()

    def __call__(self) -> None:
        self.arrive()
        assert self._factors is not None
        _add_product(self._layer, self._weight, *self._factors)
