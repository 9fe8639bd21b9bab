"""Numbers of 8 bits: a tensor times a scale, rounded to e4m3 or e5m2 (arXiv 2209.05433).

A product of two such tensors is formed from the 8 bits as they are, added up in fp32, and
multiplied by what the numbers of both are worth. e4m3 has 3 bits of mantissa and reaches to 448,
e5m2 has 2 and reaches to 57344.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2

MULTIPLE = 16
"""Rows and columns of the factors of a product in 8 bits come in multiples of it: cuBLAS reads them
16 bytes at a time."""

LEAST = 2.0**-100
"""A tensor whose numbers are all smaller is scaled as if this were its largest one. So scales, and
what numbers are worth, stay finite and normal in fp32."""


def largest_number(dtype: torch.dtype) -> float:
    """Return the largest finite number of a type of 8 bits."""
    return float(torch.finfo(dtype).max)


@dataclass(frozen=True)
class EightBits:
    """A matrix in 8 bits.

    Attributes:
        bits_rk: rows whose numbers are multiplied with those of another matrix's rows, dense.
        worth: fp32 []; a number stands for itself times this.
    """

    bits_rk: Tensor
    worth: Tensor
