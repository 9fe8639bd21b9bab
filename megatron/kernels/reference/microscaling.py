"""Products of factors with a scale for every 32 numbers of a row (MXFP8), by PyTorch's operations.

Each product adds up along the rows of both factors. Groups of rows differ from groups of columns,
so rows and turned rows are both rounded from the unrounded tensor; this holds for weights too. A
worth times a number of 8 bits is exact in fp32, and such products are multiplied as they are.

Shapes: s rows, k numbers of a row, m and n rows of the factors of a product.
"""

import torch
from torch import Tensor

from megatron.kernels.eight_bits import EightBits, powers_of_two, rounded
from megatron.kernels.microscaling import GROUP, in_tiles, in_whole_tiles, out_of_tiles
from megatron.kernels.reference.products import ProductOperations

_MANTISSA = 23
"""Bits of the mantissa of fp32."""


class MicroscalingOperations(ProductOperations):
    """The part of ``Kernels`` about groups of 32 numbers; nothing has a gradient."""

    def quantise_mx(
        self, x_sk: Tensor, dtype: torch.dtype, *, straight: bool, turned: bool
    ) -> tuple[EightBits | None, EightBits | None]:
        """Round a matrix, with a scale for every 32 numbers of a result's row.

        Infinity and NaN become NaN, and no other number is too large. ``worth`` is as in
        ``microscaling.in_tiles``.

        Args:
            x_sk: activations.
            dtype: e4m3 or e5m2.
            straight: return the result [s, k] first; k is a multiple of 32. Otherwise ``None``.
            turned: return the rows as columns [k, s] second; s is a multiple of 32. Otherwise
                ``None``.
        """
        return (
            _in_groups(x_sk, dtype) if straight else None,
            _in_groups(x_sk.T, dtype) if turned else None,
        )

    def mx_product(
        self, left: EightBits, right: EightBits, dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """Return every row of one factor times every row of the other, [m, n], rounded once.

        Args:
            left: [m, k], from ``quantise_mx``.
            right: [n, k], likewise; one factor at most is e5m2.
            dtype: type of the result.
            bias: [n], added to every row, of type ``dtype``.
        """
        total_mn = values(left) @ values(right).T
        return (total_mn if bias is None else total_mn.add_(bias)).to(dtype)

    def accumulate_mx_product_(
        self, total: Tensor, left: EightBits, right: EightBits, *, begins: bool
    ) -> None:
        """``total += mx_product(left, right)``.

        Args:
            total: [m, n], as in ``accumulate_``.
            left: as in ``mx_product``.
            right: as in ``mx_product``.
            begins: as in ``accumulate_product_``.
        """
        product_mn = self.mx_product(left, right, total.dtype)
        if begins:
            total.copy_(product_mn)
        else:
            self.accumulate_(total, product_mn)


def values(factor: EightBits) -> Tensor:
    """Return the numbers that a factor [r, k] stands for, fp32."""
    worth_rc = out_of_tiles(factor.worth, *factor.bits.shape)
    return factor.bits.float() * worth_rc.repeat_interleave(GROUP, 1)


def _in_groups(x_rk: Tensor, dtype: torch.dtype) -> EightBits:
    """Round a matrix in groups along its rows."""
    r, k = x_rk.shape
    assert k % GROUP == 0, k
    groups_rcg = in_whole_tiles(x_rk).unflatten(1, (-1, GROUP))
    scale_rc1, worth_rc1 = powers_of_two(groups_rcg.abs().amax(2, keepdim=True), dtype)
    bits_rk = rounded(groups_rcg, scale_rc1, dtype).flatten(1)[:r, :k].contiguous()
    exponent_rc = worth_rc1.squeeze(2).view(torch.int32) >> _MANTISSA
    return EightBits(bits_rk, in_tiles(exponent_rc))
