"""Products of groups of rows, where every group has its own matrix: linear layers of experts.

The rows of a group lie one after the other, and groups follow in the order of their matrices. Only
the device knows how many rows a group has. Where PyTorch has one kernel for all groups, the host
does not wait for these numbers.

Shapes: s rows of all groups, g groups, i inputs, o outputs.
"""

from itertools import pairwise
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

_TYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_BYTES_AT_ONCE: Final = 16


def product(x_si: Tensor, weight_gio: Tensor, ends_g: Tensor) -> Tensor:
    """Return every row times the matrix of its group, [s, o].

    Args:
        x_si: activations.
        weight_gio: a matrix for each group; it may be a transposed view, which is not copied.
        ends_g: int32, for each group the row after its last one, ascending; the last number is s.
    """
    if _has_kernel(x_si, weight_gio[0]):
        made: Tensor = functional.grouped_mm(x_si, weight_gio, offs=ends_g)
        return made
    return product_by_group(x_si, weight_gio, ends_g)


def weight_product(grad_so: Tensor, x_si: Tensor, ends_g: Tensor) -> Tensor:
    """Return for every group the product of its rows, ``grad.T @ x``, [g, o, i].

    Args:
        grad_so: gradients of the outputs, contiguous.
        x_si: the inputs, contiguous.
        ends_g: as for ``product``.
    """
    if _has_kernel(grad_so, x_si):
        made: Tensor = functional.grouped_mm(grad_so.T, x_si, offs=ends_g)
        return made
    return weight_product_by_group(grad_so, x_si, ends_g)


def product_by_group(x_si: Tensor, weight_gio: Tensor, ends_g: Tensor) -> Tensor:
    """As ``product``, group by group: the specification, in which the host waits for the device."""
    out_so = x_si.new_empty(len(x_si), weight_gio.shape[2])
    for matrix_io, (begin, end) in zip(weight_gio, _bounds(ends_g), strict=True):
        torch.mm(x_si[begin:end], matrix_io, out=out_so[begin:end])
    return out_so


def weight_product_by_group(grad_so: Tensor, x_si: Tensor, ends_g: Tensor) -> Tensor:
    """As ``weight_product``, group by group; a group without rows has a gradient of zeros."""
    return torch.stack([grad_so[a:b].T @ x_si[a:b] for a, b in _bounds(ends_g)])


def _bounds(ends_g: Tensor) -> list[tuple[int, int]]:
    """Return the first row of every group, and the row after its last one."""
    return list(pairwise([0, *ends_g.tolist()]))


def _has_kernel(*factors: Tensor) -> bool:
    """Whether PyTorch has one kernel for all groups: rows must begin at multiples of 16 bytes."""
    return all(
        factor.dtype in _TYPES
        and max(factor.stride()) * factor.element_size() % _BYTES_AT_ONCE == 0
        and min(factor.shape) > 0
        for factor in factors
    )
