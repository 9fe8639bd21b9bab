"""Strategies for the products of a layer of experts, as ``Products`` are for a linear layer.

Shapes: z slots of this rank, e experts of this rank, i input features, o output features, k one of
them.
"""

from typing import Any, Literal, Protocol, TypeAlias

from torch import Tensor

from megatron.kernels.grouped import GroupedKernels
from megatron.layers.products import Kept

Side: TypeAlias = Literal["input", "gradient"]
"""A factor with a row for every slot: the layer's input, or the gradient of its output."""


class GroupedProducts(Protocol):
    """The strategy of one layer of experts.

    A *factor* is the form in which slots are multiplied; only the strategy looks into it. The ends
    of the experts' slots are int32 [e], as in ``Order``.
    """

    def factor(
        self, side: Side, rows_zk: Tensor, ends_e: Tensor, *, keeps: bool
    ) -> tuple[Any, Kept]:
        """Return slots as a factor, and the tensors to keep of the factor for W.

        Args:
            side: what the slots are.
            rows_zk: the slots.
            ends_e: of the experts.
            keeps: whether W needs the factor; otherwise no tensor is returned.
        """
        ...

    def again(self, side: Side, kept: Kept, ends_e: Tensor) -> Any:
        """Make a factor for W from the kept tensors."""
        ...

    def for_weight(self, side: Side, rows_zk: Tensor, ends_e: Tensor) -> Any:
        """Make a factor for W from slots that have been dispatched again."""
        ...

    def output(self, x: Any, weight_eoi: Tensor, ends_e: Tensor) -> Tensor:
        """Return every slot times the matrix of its expert, [z, o]."""
        ...

    def input_gradient(self, grad: Any, weight_eoi: Tensor, ends_e: Tensor) -> Tensor:
        """Return the gradients of the slots, [z, i]."""
        ...

    def weight_gradient(self, grad: Any, x: Any, ends_e: Tensor) -> Tensor:
        """Return the gradients of the matrices, [e, o, i]."""
        ...

    def accumulate_(
        self, total_eoi: Tensor, grad: Any, x: Any, ends_e: Tensor, *, begins: bool
    ) -> None:
        """Add ``weight_gradient`` to ``total_eoi``, or overwrite it if the sum ``begins``."""
        ...


class PlainGroupedProducts:
    """Products in the dtype of the activations; a factor is the tensor itself.

    Args:
        kernels: of the layer, or of another package.
    """

    def __init__(self, kernels: GroupedKernels) -> None:
        self._kernels = kernels

    def factor(
        self, side: Side, rows_zk: Tensor, ends_e: Tensor, *, keeps: bool
    ) -> tuple[Tensor, Kept]:
        """See ``GroupedProducts``."""
        return rows_zk, (rows_zk,) if keeps else ()

    def again(self, side: Side, kept: Kept, ends_e: Tensor) -> Tensor:
        """See ``GroupedProducts``."""
        return kept[0]

    def for_weight(self, side: Side, rows_zk: Tensor, ends_e: Tensor) -> Tensor:
        """See ``GroupedProducts``."""
        return rows_zk

    def output(self, x: Tensor, weight_eoi: Tensor, ends_e: Tensor) -> Tensor:
        """See ``GroupedProducts``."""
        return self._kernels.grouped_product(x, weight_eoi.transpose(1, 2), ends_e)

    def input_gradient(self, grad: Tensor, weight_eoi: Tensor, ends_e: Tensor) -> Tensor:
        """See ``GroupedProducts``."""
        return self._kernels.grouped_product(grad, weight_eoi, ends_e)

    def weight_gradient(self, grad: Tensor, x: Tensor, ends_e: Tensor) -> Tensor:
        """See ``GroupedProducts``."""
        return self._kernels.grouped_weight_product(grad, x, ends_e)

    def accumulate_(
        self, total_eoi: Tensor, grad: Tensor, x: Tensor, ends_e: Tensor, *, begins: bool
    ) -> None:
        """See ``GroupedProducts``."""
        self._kernels.accumulate_grouped_product_(total_eoi, grad, x, ends_e, begins=begins)
