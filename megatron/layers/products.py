"""How a linear layer multiplies: a strategy, so that no layer asks for the type of its factors.

A layer has three products: of input and weight, of the output's gradient and the weight, and of
that gradient and the input. Its strategy makes *factors* of input and gradient, keeps what a later
product needs of them, and forms the products. Ranks that share a layer gather tokens where a factor
is made. What is kept is of the tokens that this rank has alone, and is gathered again.

Shapes: ``...`` any leading dimensions, n their product, i input features, o output features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from torch import Tensor
from torch.nn import functional

from megatron.kernels.face import Kernels
from megatron.parallel.lanes import Pending
from megatron.parallel.tensor import TensorParallel

Factor = TypeVar("Factor")
T = TypeVar("T")

Kept: TypeAlias = tuple[Tensor, ...]
"""What is kept of a factor until W."""


@dataclass(frozen=True)
class Normed(Generic[Factor]):
    """A norm as a factor.

    Attributes:
        factor: of the norm.
        kept: of the factor.
        mean_n: fp32, of every row; ``None``: it is an RMSNorm.
        inverse_n: fp32, the inverse deviation or root mean square of every row.
    """

    factor: Factor
    kept: Kept
    mean_n: Tensor | None
    inverse_n: Tensor


FormsNorm: TypeAlias = Callable[[Tensor, Tensor, Tensor | None, float], Normed[Factor]]
"""Forms a norm as a factor, of what the norm is of, its scale, its bias and epsilon."""


class Products(Protocol[Factor]):
    """The strategy of one layer.

    Attributes:
        accumulates: whether ``accumulate_`` is to be used where there is a sum of gradients;
            otherwise autograd adds what ``weight_gradient`` returns.
        are_autograds: autograd's own layer forms the same products, and keeps the same.
    """

    accumulates: bool
    are_autograds: bool

    def of_input(self, x: Tensor, ranks: TensorParallel) -> tuple[Factor, Kept]:
        """Return the factor of an input [..., i], and what to keep of it.

        Args:
            x: of this rank's tokens.
            ranks: that gather it.
        """
        ...

    def of_norm(self, x: Tensor, ranks: TensorParallel) -> FormsNorm[Factor] | None:
        """Return what forms the factor of a norm in the norm's own pass.

        Args:
            x: of the shape and type of what the norm is of; not read.
            ranks: that would gather the norm.

        Returns:
            ``None``: the norm comes first, and its factor by ``of_input``.
        """
        ...

    def of_gradient(self, grad: Tensor, ranks: TensorParallel) -> tuple[Factor, Kept]:
        """Return the factor of an output's gradient [..., o]; otherwise as ``of_input``."""
        ...

    def start_input_again(self, kept: Kept, ranks: TensorParallel) -> Pending[Factor]:
        """Begin to make the factor of an input from what was kept of it.

        The caller waits before it calls any method of ``ranks``.
        """
        ...

    def input_again(self, kept: Kept, ranks: TensorParallel) -> Factor:
        """Make the factor of an input from what was kept of it."""
        ...

    def gradient_again(self, kept: Kept, ranks: TensorParallel) -> Factor:
        """Make the factor of a gradient from what was kept of it."""
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
    """Products in the type of the activations; a factor is the tensor itself.

    Shapes and layouts are those of autograd's own products.

    Args:
        kernels: of the layer.
    """

    are_autograds = True

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.accumulates = kernels.accumulates_products

    def of_input(self, x: Tensor, ranks: TensorParallel) -> tuple[Tensor, Kept]:
        """See ``Products``."""
        return ranks.gather(x), (x,)

    def of_norm(self, x: Tensor, ranks: TensorParallel) -> None:
        """See ``Products``: a norm is a factor as it is."""

    def of_gradient(self, grad: Tensor, ranks: TensorParallel) -> tuple[Tensor, Kept]:
        """See ``Products``."""
        return ranks.gather(grad), (grad,)

    def start_input_again(self, kept: Kept, ranks: TensorParallel) -> Pending[Tensor]:
        """See ``Products``."""
        return ranks.start_gather(kept[0])

    def input_again(self, kept: Kept, ranks: TensorParallel) -> Tensor:
        """See ``Products``."""
        return ranks.gather(kept[0])

    gradient_again = input_again

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
    """What becomes of a result, once it is there.

    Args:
        pending: the result.
        make: what to make of it.
    """

    def __init__(self, pending: Pending[Any], make: Callable[[Any], T]) -> None:
        self._pending, self._make = pending, make

    def wait(self) -> T:
        """As in ``Pending``."""
        return self._make(self._pending.wait())


def rows(x: Tensor) -> Tensor:
    """[..., i] -> [n, i]."""
    return x.reshape(-1, x.shape[-1])
