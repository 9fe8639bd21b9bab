"""Products in 8 bits but for the weight's gradient, which is in the activations' dtype.

So the columns of a factor are the tensor itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.layers.eight_bits import Ends, Layouts, Multiplier
from megatron.layers.experts.grouped_products import PlainGroupedProducts, Slots
from megatron.layers.products import Kept, PlainProducts
from megatron.layers.scales import Role


@dataclass(frozen=True)
class Both:
    """A factor in 8 bits, if a product needs 8 bits, and in the activations' dtype."""

    narrow: Any
    wide: Any


class WideWeightGradients(Multiplier[Both]):
    """See ``Multiplier``.

    Args:
        narrow: forms the output and the input's gradient.
        plain: forms the weight's gradient.
    """

    def __init__(
        self, narrow: Multiplier[Any], plain: PlainProducts | PlainGroupedProducts
    ) -> None:
        self._narrow, self._plain = narrow, plain
        self.accumulates = plain.accumulates

    def factor(self, role: Role, x: Tensor, layouts: Layouts, ends_e: Ends = None) -> Both:
        """See ``Multiplier``."""
        narrow = None if layouts == "columns" else self._narrow.factor(role, x, "rows", ends_e)
        return Both(narrow, x if ends_e is None else Slots(x, ends_e))

    def weight(self, weight: Tensor) -> Both:
        """See ``Multiplier``."""
        return Both(self._narrow.weight(weight), None)

    def gathered_weight(self, bits_rk: Tensor, worth_gbc: Tensor) -> Both:
        """See ``Multiplier``."""
        return Both(self._narrow.gathered_weight(bits_rk, worth_gbc), None)

    def tensors(self, weight: Both) -> Sequence[Tensor]:
        """See ``Multiplier``."""
        return self._narrow.tensors(weight.narrow)

    def kept(self, role: Role, factor: Both) -> Kept:
        """See ``Multiplier``."""
        return (factor.wide.rows_zk if isinstance(factor.wide, Slots) else factor.wide,)

    def again(self, role: Role, kept: Kept, ends_e: Ends = None) -> Both:
        """See ``Multiplier``."""
        return self.factor(role, kept[0], "columns", ends_e)

    def output(self, x: Both, weight: Both, bias: Tensor | None) -> Tensor:
        """See ``Multiplier``."""
        return self._narrow.output(x.narrow, weight.narrow, bias)

    def input_gradient(self, grad: Both, weight: Both) -> Tensor:
        """See ``Multiplier``."""
        return self._narrow.input_gradient(grad.narrow, weight.narrow)

    def weight_gradient(self, grad: Both, x: Both) -> Tensor:
        """See ``Multiplier``."""
        return self._plain.weight_gradient(grad.wide, x.wide)

    def accumulate_(self, total: Tensor, grad: Both, x: Both, *, begins: bool) -> None:
        """See ``Multiplier``."""
        self._plain.accumulate_(total, grad.wide, x.wide, begins=begins)
