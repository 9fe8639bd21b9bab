"""Products of a linear layer by the kernels, with a scale for every 32 numbers (MXFP8).

All three products sum along groups of their own: each factor, weights too, is rounded by rows for
one product and by columns for another, both from the unrounded tensor. The columns of an input are
rounded in the forward, together with its rows, and kept until W in 8 bits. So the unrounded input
need not be kept, which would take twice the bytes, and it is read once. Ranks that share tokens
keep their own tokens unrounded (``Multiplier.shared``).

Shapes: ``...`` any leading dimensions, n their product; i input features, o output features.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.kernels.eight_bits import EightBits
from megatron.kernels.face import Kernels
from megatron.layers.block_multiplier import InBlocks
from megatron.layers.eight_bit_settings import Format, types_of
from megatron.layers.eight_bits import Ends, Layouts, Multiplier
from megatron.layers.products import Kept, rows
from megatron.layers.scales import Role


class MicroscalingMultiplier(Multiplier[InBlocks]):
    """See ``Multiplier``.

    Args:
        kernels: of the layer.
        dtype: of activations.
        form: 8-bit types of the factors.
    """

    def __init__(self, kernels: Kernels, dtype: torch.dtype, form: Format) -> None:
        self._kernels, self._dtype, self._types = kernels, dtype, types_of(form)

    def factor(self, role: Role, x: Tensor, layouts: Layouts, ends_e: Ends = None) -> InBlocks:
        """See ``Multiplier``."""
        assert ends_e is None, "experts have no products with scales of 32 numbers"
        made = self._kernels.quantise_mx(
            rows(x), self._types[role], straight=layouts != "columns", turned=layouts != "rows"
        )
        return InBlocks(x.shape[:-1], *made)

    def gathered_weight(self, bits_rk: Tensor, worth_gbc: Tensor) -> InBlocks:
        """Raise an error: columns cannot be made from rows that were gathered."""
        raise AssertionError("columns in 8 bits do not follow from rows in 8 bits")

    def tensors(self, weight: InBlocks) -> Sequence[Tensor]:
        """See ``Multiplier``."""
        by_rows, by_columns = weight.straight, weight.turned
        return by_rows.bits, by_rows.worth, by_columns.bits, by_columns.worth

    def kept(self, role: Role, factor: InBlocks) -> Kept:
        """See ``Multiplier``."""
        return factor.turned.bits, factor.turned.worth

    def again(self, role: Role, kept: Kept, ends_e: Ends = None) -> InBlocks:
        """See ``Multiplier``."""
        bits, worth = kept
        return InBlocks(bits.shape[1:], None, EightBits(bits, worth))

    def output(self, x: InBlocks, weight: InBlocks, bias: Tensor | None) -> Tensor:
        """See ``Multiplier``."""
        y_no = self._kernels.mx_product(x.straight, weight.straight, self._dtype, bias)
        return y_no.view(*x.leading, -1)

    def input_gradient(self, grad: InBlocks, weight: InBlocks) -> Tensor:
        """See ``Multiplier``."""
        x_grad_ni = self._kernels.mx_product(grad.straight, weight.turned, self._dtype)
        return x_grad_ni.view(*grad.leading, -1)

    def weight_gradient(self, grad: InBlocks, x: InBlocks) -> Tensor:
        """See ``Multiplier``."""
        return self._kernels.mx_product(grad.turned, x.turned, self._dtype)

    def accumulate_(self, total: Tensor, grad: InBlocks, x: InBlocks, *, begins: bool) -> None:
        """See ``Multiplier``."""
        self._kernels.accumulate_mx_product_(total, grad.turned, x.turned, begins=begins)
