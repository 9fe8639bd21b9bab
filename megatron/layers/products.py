"""Strategies for the products of a linear layer, so that the layer need not know their dtype.

A layer has three products: input times weight, the output's gradient times weight, and the output's
gradient times input. A strategy turns inputs and gradients into *factors*, the form in which they
are multiplied, and forms the products. It also chooses the tensors to keep for a later product.
Ranks that share a layer gather tokens when a factor is made. A rank keeps only its own tokens, and
gathers again later.

Shapes: ``...`` any leading dimensions, n their product, i input features, o output features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from megatron.kernels.face import Kernels
from megatron.parallel.lanes import Pending
from megatron.parallel.tensor import TensorParallel

Factor = TypeVar("Factor")
T = TypeVar("T")

Kept: TypeAlias = tuple[Tensor, ...]
"""The tensors that are kept of a factor for the weight's gradient."""


@dataclass(frozen=True)
class Normed(Generic[Factor]):
    """A norm as a factor.

    Attributes:
        factor: the norm in the form that a layer multiplies.
        kept: the tensors that are kept of the factor.
        mean_n: fp32, the mean of every row; ``None``: the norm is an RMSNorm.
        inverse_n: fp32, for every row the inverse of the standard deviation or root mean square.
    """

    factor: Factor
    kept: Kept
    mean_n: Tensor | None
    inverse_n: Tensor


FormsNorm: TypeAlias = Callable[[Tensor, Tensor, Tensor | None, float], Normed[Factor]]
"""Computes a norm as a factor, from the norm's input, scale, bias and epsilon."""


class Products(Protocol[Factor]):
    """The strategy of one layer.

    Attributes:
        accumulates: whether to use ``accumulate_`` if there is a sum of gradients; otherwise
            autograd adds the result of ``weight_gradient``.
        are_autograds: whether PyTorch's own linear layer forms the same products, and keeps the
            same tensors.
        keeps_parts: whether parts of an input, one behind the other in dimension 1, may be kept in
            place of the input.
    """

    accumulates: bool
    are_autograds: bool
    keeps_parts: bool

    def of_input(self, x: Tensor, ranks: TensorParallel) -> tuple[Factor, Kept]:
        """Return the factor of an input [..., i], and the tensors to keep of it.

        Args:
            x: the input, for this rank's tokens.
            ranks: the ranks that gather the input.
        """
        ...

    def of_norm(self, x: Tensor, ranks: TensorParallel) -> FormsNorm[Factor] | None:
        """Return a function that computes a norm and its factor in one kernel.

        Args:
            x: a tensor with the shape and dtype of the norm's input; its values are not read.
            ranks: the ranks that would gather the norm.

        Returns:
            The function, or ``None`` if there is none: the caller computes the norm, and then the
            factor by ``of_input``.
        """
        ...

    def of_gradient(self, grad: Tensor, ranks: TensorParallel) -> tuple[Factor, Kept]:
        """Return the factor of an output's gradient [..., o]; see ``of_input``."""
        ...

    def start_input_again(self, kept: Kept, ranks: TensorParallel) -> Pending[Factor]:
        """Begin to make the factor of an input from the kept tensors.

        Until the caller has waited for the result, it only begins more such factors: see
        ``TensorParallel.start_gather``.
        """
        ...

    def start_gradient_again(self, kept: Kept, ranks: TensorParallel) -> Pending[Factor]:
        """Begin to make the factor of a gradient; see ``start_input_again``."""
        ...

    def output(self, x: Factor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``, [..., o]."""
        ...

    def input_gradient(self, grad: Factor, weight: Tensor) -> Tensor:
        """Return ``grad @ weight``, [..., i]."""
        ...

    def weight_gradient(self, grad: Factor, x: Factor) -> Tensor:
        """Return ``grad.T @ x``, [o, i]."""
        ...

    def accumulate_(self, total: Tensor, grad: Factor, x: Factor, *, begins: bool) -> None:
        """Add ``weight_gradient`` to ``total``, or overwrite it if the sum ``begins``."""
        ...


class PlainProducts:
    """Products in the dtype of the activations; a factor is the tensor itself.

    Shapes and layouts are the same as in autograd's own products.

    Args:
        kernels: of the layer.
    """

    are_autograds = True
    keeps_parts = True

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.accumulates = kernels.accumulates_products

    def of_input(self, x: Tensor, ranks: TensorParallel) -> tuple[Tensor, Kept]:
        """See ``Products``."""
        return ranks.gather(x), (x,)

    def of_norm(self, x: Tensor, ranks: TensorParallel) -> None:
        """See ``Products``: always ``None``, because a norm's output is already a factor."""

    def of_gradient(self, grad: Tensor, ranks: TensorParallel) -> tuple[Tensor, Kept]:
        """See ``Products``."""
        return ranks.gather(grad), (grad,)

    def start_input_again(self, kept: Kept, ranks: TensorParallel) -> Pending[Tensor]:
        """See ``Products``."""
        return ranks.start_gather(whole_of(kept))

    start_gradient_again = start_input_again

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See ``Products``."""
        return functional.linear(x, weight, bias)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """See ``Products``."""
        return grad @ weight

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """See ``Products``."""
        return rows(grad).T @ rows(x)

    def accumulate_(self, total: Tensor, grad: Tensor, x: Tensor, *, begins: bool) -> None:
        """See ``Products``."""
        self._kernels.accumulate_product_(total, rows(grad).T, rows(x), begins=begins)


class Then(Generic[T]):
    """A pending result that a function turns into another one when it arrives.

    Args:
        pending: the first result.
        make: the function.
    """

    def __init__(self, pending: Pending[Any], make: Callable[[Any], T]) -> None:
        self._pending, self._make = pending, make

    def wait(self) -> T:
        """As in ``Pending``."""
        return self._make(self._pending.wait())


def whole_of(parts: Sequence[Tensor]) -> Tensor:
    """Return parts of a tensor, one behind the other in dimension 1, as one tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), 1)


def rows(x: Tensor) -> Tensor:
    """[..., i] -> [n, i]."""
    return x.reshape(-1, x.shape[-1])
