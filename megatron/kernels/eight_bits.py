"""Numbers of 8 bits: a tensor times a scale, rounded to e4m3 or e5m2 (arXiv 2209.05433).

A product multiplies the 8-bit numbers of two tensors as they are, and adds up in fp32. Then it
multiplies by the *worth* of both tensors, the factor that undoes a tensor's scale. e4m3 has 3 bits
of mantissa and numbers up to 448, e5m2 has 2 bits and numbers up to 57344.

Blocks of a tensor may have scales of their own. A product then multiplies the sum over each block
by the worths of both blocks, and adds up the results.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

MULTIPLE = 16
"""A factor of a product in 8 bits has a multiple of 16 rows and columns: cuBLAS reads 16 bytes at a
time."""

BLOCK: Final = 128
"""With scales of blocks, numbers of a row that share a scale; weights have squares of this size. A
block at an edge has fewer numbers."""

LEAST = 2.0**-100
"""A tensor whose numbers are all smaller is scaled as if this were its largest number. So scales
and worths stay finite and normal in fp32."""

_MANTISSA, _OFFSET, _INFINITY = 23, 127, 0x7F800000
"""Of fp32: bits of the mantissa, offset of the exponent, and the bits of infinity."""
_ABOVE_1_75 = (1 << _MANTISSA) - 1 - 3 * (1 << (_MANTISSA - 2))
"""Added to the bits of a number above 1.75 times a power of two, it raises the exponent by one."""


def largest_number(dtype: torch.dtype) -> float:
    """Return the largest finite number of a type of 8 bits."""
    return float(torch.finfo(dtype).max)


@dataclass(frozen=True)
class EightBits:
    """A matrix in 8 bits; or rows of g groups, or a matrix for each of them.

    Attributes:
        bits: the 8-bit numbers, dense. A product multiplies them by the rows of another matrix.
        worth: fp32 [], or [g] for groups; each number stands for itself times its worth. With
            scales of blocks [c, r] for rows [r, k], where c is the number of blocks of a row; for
            matrices [g, n, k], whose blocks are squares, [g, b, c]. With a scale for every 32
            numbers not fp32, but tiles (``microscaling.py``).
    """

    bits: Tensor
    worth: Tensor


def places(rows: int, groups: int) -> int:
    """Return how many columns the rows of groups take where they are *turned*.

    Then the rows stand beside each other as columns. Each group begins at a multiple of
    ``MULTIPLE``, and zeros fill the gap behind it, so that a GPU reads 16 numbers at a time. How
    many gaps there are depends on the sizes of the groups, which the host does not know.
    """
    return (-(-rows // MULTIPLE) + groups) * MULTIPLE


def block_places(rows: int, groups: int) -> int:
    """Return how many columns rows of groups take that are turned and scaled in blocks.

    Each group begins at a multiple of ``BLOCK``, so that no block has numbers of two groups. Zeros
    fill the gap up to the next multiple of ``MULTIPLE``. The rest of the gap is undefined.
    """
    return -(-rows // MULTIPLE) * MULTIPLE + (groups - 1) * BLOCK


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x * scale``, rounded to the nearest 8-bit numbers, by PyTorch's operations.

    A number that is too large becomes the largest one. Infinity and NaN become NaN.

    Args:
        x: the numbers.
        scale: fp32, of a shape that fits ``x``.
        dtype: e4m3 or e5m2.
    """
    most = largest_number(dtype)
    return x.float().mul(scale).clamp_(-most, most).masked_fill_(x.isinf(), torch.nan).to(dtype)


def powers_of_two(largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the scales of blocks, powers of two, and their inverses; fp32, of any shape.

    A scale is the largest power of two by which all numbers of a block stay within ``dtype``. It is
    made of the bits of the largest magnitude, so that every device finds the same scale.

    Args:
        largest: the largest magnitude of each block; infinity and NaN give a small scale.
        dtype: e4m3 or e5m2, whose largest numbers are both 1.75 times a power of two.
    """
    exponent_of_most = int(math.log2(largest_number(dtype)))
    bits = largest.float().clamp(min=LEAST).view(torch.int32).clamp(max=_INFINITY)
    # Magnitudes above 1.75 times a power of two carry into the exponent.
    exponent = (bits + _ABOVE_1_75) >> _MANTISSA
    scale = (exponent_of_most + 2 * _OFFSET - exponent) << _MANTISSA
    worth = (exponent - exponent_of_most) << _MANTISSA
    return scale.view(torch.float32), worth.view(torch.float32)
