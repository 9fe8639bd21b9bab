"""Strategies for the products of a layer of experts, as ``Products`` are for a linear layer.

Shapes: z slots of this rank, e experts of this rank, i input features, o output features, k one of
them.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from megatron.kernels.grouped import GroupedKernels
from megatron.layers.products import Kept
from megatron.layers.scales import Role


class GroupedProducts(Protocol):
    """The strategy of one layer of experts.

    A *factor* is the form in which slots are multiplied; only the strategy looks into it. It has a
    row for every slot, and is the layer's input or the gradient of its output. The ends of the
    experts' slots are int32 [e], as in ``Order``.
    """

    def factor(
        self, role: Role, rows_zk: Tensor, ends_e: Tensor, *, keeps: bool
    ) -> tuple[Any, Kept]:
        """Return slots as a factor, and the tensors to keep of the factor for W.

        Args:
            role: the layer's input, or the gradient of its output.
            rows_zk: the slots.
            ends_e: of the experts.
            keeps: whether W needs the factor; otherwise no tensor is returned.
        """
        ...

    def again(self, role: Role, kept: Kept, ends_e: Tensor) -> Any:
        """Make a factor for W from the kept tensors."""
        ...

    def for_weight(self, role: Role, rows_zk: Tensor, ends_e: Tensor) -> Any:
        """Make a factor for W from slots that have been dispatched again."""
        ...

    def output(self, x: Any, weight: Tensor) -> Tensor:
        """Return every slot times the matrix of its expert, [z, o]."""
        ...

    def input_gradient(self, grad: Any, weight: Tensor) -> Tensor:
        """Return the gradients of the slots, [z, i]."""
        ...

    def weight_gradient(self, grad: Any, x: Any) -> Tensor:
        """Return the gradients of the matrices, [e, o, i]."""
        ...

    def accumulate_(self, total: Tensor, grad: Any, x: Any, *, begins: bool) -> None:
        """Add ``weight_gradient`` to ``total`` [e, o, i], or overwrite it if the sum ``begins``."""
        ...


@dataclass(frozen=True)
class Slots:
    """Slots, and the ends of the experts' slots."""

    rows_zk: Tensor
    ends_e: Tensor


class PlainGroupedProducts:
    """Products in the dtype of the activations; a factor is the slots themselves.

    Args:
        kernels: of the layer, or of another package.
    """

    accumulates = True

    def __init__(self, kernels: GroupedKernels) -> None:
        self._kernels = kernels

    def factor(
        self, role: Role, rows_zk: Tensor, ends_e: Tensor, *, keeps: bool
    ) -> tuple[Slots, Kept]:
        """See ``GroupedProducts``."""
        return Slots(rows_zk, ends_e), (rows_zk,) if keeps else ()

    def again(self, role: Role, kept: Kept, ends_e: Tensor) -> Slots:
        """See ``GroupedProducts``."""
        return Slots(kept[0], ends_e)

    def for_weight(self, role: Role, rows_zk: Tensor, ends_e: Tensor) -> Slots:
        """See ``GroupedProducts``."""
        return Slots(rows_zk, ends_e)

    def output(self, x: Slots, weight: Tensor) -> Tensor:
        """See ``GroupedProducts``."""
        return self._kernels.grouped_product(x.rows_zk, weight.transpose(1, 2), x.ends_e)

    def input_gradient(self, grad: Slots, weight: Tensor) -> Tensor:
        """See ``GroupedProducts``."""
        return self._kernels.grouped_product(grad.rows_zk, weight, grad.ends_e)

    def weight_gradient(self, grad: Slots, x: Slots) -> Tensor:
        """See ``GroupedProducts``."""
        return self._kernels.grouped_weight_product(grad.rows_zk, x.rows_zk, x.ends_e)

    def accumulate_(self, total: Tensor, grad: Slots, x: Slots, *, begins: bool) -> None:
        """See ``GroupedProducts``."""
        self._kernels.accumulate_grouped_product_(
            total, grad.rows_zk, x.rows_zk, x.ends_e, begins=begins
        )
