"""Linear layers whose backward can be split into a part for B and a part that W does later.

The previous stage waits only for the input gradient. If a schedule has W passes, the other product
of the backward, output gradient times input, is handed out as a closure. It runs when the schedule
says so (zero bubble, arXiv 2401.10241, section 2). Weights are drawn once, by
``megatron.model.init``.

Shapes: ``...`` any leading dimensions, n their product, i input features, o output features.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megatron.kernels.autograd import apply
from megatron.kernels.face import Kernels
from megatron.layers.main_grad import main_grad_of

Defer: TypeAlias = Callable[[Callable[[], None]], None]
"""Receives the work that a backward leaves for later; called once per linear layer."""


class Linear(nn.Linear):
    """``torch.nn.Linear`` that can leave its weight gradient for later.

    Args:
        in_features: i.
        out_features: o.
        bias: whether the layer has a bias.
        device: where the parameters live.
        dtype: type of the parameters.
        kernels: of that device and type.

    Attributes:
        defer: receives the product of the weight gradient as work for later. Autograd then forms
            only the gradients of the input and of the bias, and the work adds the product to
            ``weight.main_grad``. ``None``: autograd forms all gradients.
        keeps_first: keep the input before the product is formed, not after it, as autograd's own
            layer does: computing a layer again may then end before its last product.
    """

    defer: Defer | None = None
    keeps_first = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self._kernels = kernels

    def reset_parameters(self) -> None:
        """Do nothing: ``megatron.model.init`` sets the values, from the right generator."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., i] -> [..., o]."""
        if self.defer is None or not self.weight.requires_grad:
            return super().forward(x)
        left = None
        if self.keeps_first:
            left = list[Tensor]()
            x = apply(_KeptInput, x, self.weight, left, self.defer, self._kernels)
        return apply(_SplitLinear, x, self.weight, self.bias, left, self.defer, self._kernels)

    if TYPE_CHECKING:  # PyTorch says of the call of a module only that it may return anything

        def __call__(self, x: Tensor) -> Tensor:
            """See ``forward``."""


def defer_weight_gradients(module: nn.Module, defer: Defer | None) -> None:
    """Split the backward of every ``Linear`` in ``module``, or join it again with ``None``."""
    for part in module.modules():
        if isinstance(part, Linear):
            part.defer = defer


class _SplitLinear(torch.autograd.Function):
    """``functional.linear`` whose backward leaves the product of the weight gradient to ``defer``.

    The products have the shapes and layouts of autograd's own; the results are equal bit for bit.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        left: list[Tensor] | None,
        defer: Defer,
        kernels: Kernels,
    ) -> Tensor:
        if left is None:
            ctx.save_for_backward(x)
        # A kept tensor that is computed again is not the parameter, which has the sum of gradients.
        ctx.weight, ctx.left, ctx.defer, ctx.kernels = weight, left, defer, kernels
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.weight
        grad_no = grad.reshape(-1, grad.shape[-1])
        x_grad = bias_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = (grad_no @ weight).view(*grad.shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[2]:
            bias_grad = grad_no.sum(0)
        if ctx.left is None:
            (x,) = ctx.saved_tensors  # refuses an input that was changed since
            ctx.defer(_weight_gradient(ctx.kernels, weight, grad_no, x))
        else:
            ctx.left.append(grad_no)
        return x_grad, None, bias_grad, None, None, None


class _KeptInput(torch.autograd.Function):
    """Keeps the input of a ``_SplitLinear`` for it, and takes up the gradient that it leaves."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, left: list[Tensor], defer: Defer, kernels: Kernels
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.left, ctx.defer, ctx.kernels = weight, left, defer, kernels
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        ctx.defer(_weight_gradient(ctx.kernels, ctx.weight, ctx.left.pop(), x))
        return grad, None, None, None, None


def _weight_gradient(
    kernels: Kernels, weight: Tensor, grad_no: Tensor, x: Tensor
) -> Callable[[], None]:
    """Return the work of W, which keeps only its two factors of the graph alive."""
    x_ni = x.detach().reshape(-1, x.shape[-1])  # without the graph that x came from
    versions = grad_no._version, x_ni._version

    def work() -> None:
        assert versions == (grad_no._version, x_ni._version), (
            "a factor of a deferred weight gradient was changed in place between B and W"
        )
        kernels.accumulate_product_(main_grad_of(weight), grad_no.T, x_ni)

    return work
