"""Products in 8 bits, emulated: factors are rounded as a GPU rounds them, and multiplied in fp32.

Every number of 8 bits is one of fp32, and so is every product of two. So the results differ from a
GPU's in the order of the sums only.

Shapes: r rows, k numbers of a row.
"""

import torch
from torch import Tensor

from megatron.kernels.eight_bits import EightBits, largest_number


def largest(x: Tensor) -> Tensor:
    """See ``Kernels``."""
    found: Tensor = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
    return found


def quantise(
    x_rk: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    straight: bool,
    turned: bool,
    seen: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """See ``Kernels``."""
    if seen is not None:
        torch.maximum(seen, largest(x_rk), out=seen)
    most = largest_number(dtype)
    scaled_rk = x_rk.float().mul(scale).clamp_(-most, most)
    bits_rk = scaled_rk.masked_fill_(x_rk.isinf(), torch.nan).to(dtype)
    return bits_rk if straight else None, bits_rk.T.contiguous() if turned else None


def product(left: EightBits, right: EightBits, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """See ``Kernels.eight_bit_product``."""
    total = left.bits_rk.float() @ right.bits_rk.float().T
    total.mul_(left.worth).mul_(right.worth)
    return (total if bias is None else total.add_(bias)).to(dtype)
