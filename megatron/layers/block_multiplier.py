"""Products in 8 bits with scales of blocks by the kernels, of a linear layer or a layer of experts.

Blocks along rows differ from blocks along columns. So rows and columns are both rounded from the
unrounded tensor, and columns cannot be made from rows later. A factor for W is kept by columns, and
ranks that share tokens keep their own tokens unrounded. No scale is kept between passes.

Shapes: ``...`` any leading dimensions, n their product; z slots, e experts; i input features, o
output features, k one of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kernels.eight_bits import EightBits
from megatron.kernels.face import Kernels
from megatron.layers.eight_bit_settings import Format, types_of
from megatron.layers.eight_bits import Ends, Layouts, Multiplier
from megatron.layers.products import Kept, rows
from megatron.layers.scales import WEIGHT, Role


@dataclass(frozen=True)
class InBlocks:
    """A factor [n, k], or matrices [e, o, i], in the layouts that are needed.

    Attributes:
        leading: the leading dimensions; n is their product.
        by_rows: blocks lie along the rows.
        by_columns: the matrix turned; blocks lie along the rows of the turned matrix.
        ends_e: ends of the experts' slots; ``None``: there are no slots.
    """

    leading: torch.Size
    by_rows: EightBits | None
    by_columns: EightBits | None
    ends_e: Ends = None

    @property
    def straight(self) -> EightBits:
        """The matrix by its rows."""
        assert self.by_rows is not None, "it was kept for W alone"
        return self.by_rows

    @property
    def turned(self) -> EightBits:
        """The matrix by its columns."""
        assert self.by_columns is not None, "it was not kept for W"
        return self.by_columns


class GroupedBlockMultiplier(Multiplier[InBlocks]):
    """See ``Multiplier``: of a layer of experts.

    Args:
        kernels: of the layer.
        dtype: of activations.
        form: 8-bit types of the factors.
    """

    def __init__(self, kernels: Kernels, dtype: torch.dtype, form: Format) -> None:
        self._kernels, self._dtype, self._types = kernels, dtype, types_of(form)

    def factor(self, role: Role, x: Tensor, layouts: Layouts, ends_e: Ends = None) -> InBlocks:
        """See ``Multiplier``."""
        by_rows, by_columns = self._kernels.quantise_blocks(
            rows(x),
            ends_e,
            self._types[role],
            straight=layouts != "columns",
            turned=layouts != "rows",
        )
        return InBlocks(x.shape[:-1], by_rows, by_columns, ends_e)

    def weight(self, weight: Tensor) -> InBlocks:
        """Return the matrices [e, o, i] in 8 bits, by rows and by columns."""
        squares = self._kernels.quantise_squares(weight, self._types[WEIGHT])
        return InBlocks(weight.shape[:1], *squares)

    def gathered_weight(self, bits_rk: Tensor, worth_gbc: Tensor) -> InBlocks:
        """See ``Multiplier``."""
        bits_gnk = bits_rk.unflatten(0, (len(worth_gbc), -1))
        turned = EightBits(bits_gnk.mT.contiguous(), worth_gbc.mT.contiguous())
        return InBlocks(bits_gnk.shape[:1], EightBits(bits_gnk, worth_gbc), turned)

    def tensors(self, weight: InBlocks) -> Sequence[Tensor]:
        """See ``Multiplier``."""
        rows, columns = weight.straight, weight.turned
        return rows.bits, rows.worth, columns.bits, columns.worth

    def kept(self, role: Role, factor: InBlocks) -> Kept:
        """See ``Multiplier``."""
        return factor.turned.bits, factor.turned.worth

    def again(self, role: Role, kept: Kept, ends_e: Ends = None) -> InBlocks:
        """See ``Multiplier``."""
        bits, worth = kept
        return InBlocks(bits.shape[1:], None, EightBits(bits, worth), ends_e)

    def output(self, x: InBlocks, weight: InBlocks, bias: Tensor | None) -> Tensor:
        """See ``Multiplier``; biases of experts are added elsewhere."""
        y_no = self._kernels.grouped_block_product(
            x.straight, weight.straight, x.ends_e, self._dtype, bias
        )
        return y_no.view(*x.leading, -1)

    def input_gradient(self, grad: InBlocks, weight: InBlocks) -> Tensor:
        """See ``Multiplier``."""
        x_grad_ni = self._kernels.grouped_block_product(
            grad.straight, weight.turned, grad.ends_e, self._dtype
        )
        return x_grad_ni.view(*grad.leading, -1)

    def weight_gradient(self, grad: InBlocks, x: InBlocks) -> Tensor:
        """See ``Multiplier``."""
        return self._kernels.grouped_block_weight_product(
            grad.turned, x.turned, x.ends_e, self._dtype
        )

    def accumulate_(self, total: Tensor, grad: InBlocks, x: InBlocks, *, begins: bool) -> None:
        """See ``Multiplier``; the product adds to ``total`` itself."""
        self._kernels.accumulate_grouped_block_product_(
            total, grad.turned, x.turned, x.ends_e, begins=begins
        )


class BlockMultiplier(GroupedBlockMultiplier):
    """See ``Multiplier``: of a linear layer, which is one group with all rows."""

    def weight(self, weight: Tensor) -> InBlocks:
        """See ``Multiplier``."""
        return super().weight(weight.unsqueeze(0))

    def weight_gradient(self, grad: InBlocks, x: InBlocks) -> Tensor:
        """See ``Multiplier``."""
        return super().weight_gradient(grad, x).squeeze(0)

    def accumulate_(self, total: Tensor, grad: InBlocks, x: InBlocks, *, begins: bool) -> None:
        """See ``Multiplier``."""
        super().accumulate_(total.unsqueeze(0), grad, x, begins=begins)
