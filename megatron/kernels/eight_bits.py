"""Numbers of 8 bits: a tensor times a scale, rounded to e4m3 or e5m2 (arXiv 2209.05433).

A product multiplies the 8-bit numbers of two tensors as they are, and adds up in fp32. Then it
multiplies by the *worth* of both tensors, the factor that undoes a tensor's scale. e4m3 has 3 bits
of mantissa and numbers up to 448, e5m2 has 2 bits and numbers up to 57344.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

MULTIPLE = 16
"""A factor of a product in 8 bits has a multiple of 16 rows and columns: cuBLAS reads 16 bytes at a
time."""

LEAST = 2.0**-100
"""A tensor whose numbers are all smaller is scaled as if this were its largest number. So scales
and worths stay finite and normal in fp32."""


def largest_number(dtype: torch.dtype) -> float:
    """Return the largest finite number of a type of 8 bits."""
    return float(torch.finfo(dtype).max)


@dataclass(frozen=True)
class EightBits:
    """A matrix in 8 bits; or rows of g groups, or a matrix for each of them.

    Attributes:
        bits: the 8-bit numbers, dense. A product multiplies them by the rows of another matrix.
        worth: fp32 [], or [g] for groups; each number stands for itself times its worth.
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
