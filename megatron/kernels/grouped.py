"""Products of groups of rows, each with a matrix of its own: the linear layers of experts.

The rows of a group lie one after the other, and groups follow in the order of their matrices. On a
CPU PyTorch's function multiplies group by group, and so does the loop here, which is the
specification. ``cuda/grouped.py`` is for GPUs, where only the device knows the sizes of the groups.

Shapes: s rows of all groups, g groups, i inputs, o outputs.
"""

from itertools import pairwise
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional

_TYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_BYTES_AT_ONCE: Final = 16


class GroupedKernels(Protocol):
    """The part of ``Kernels`` about products of groups, which other packages can take over.

    Arguments are as in ``Kernels``, but packages want the ends of the groups on the host.
    """

    def grouped_product(self, x_si: Tensor, weight_gio: Tensor, ends_g: Tensor) -> Tensor:
        """Return every row times the matrix of its group, [s, o]."""
        ...

    def grouped_weight_product(self, grad_so: Tensor, x_si: Tensor, ends_g: Tensor) -> Tensor:
        """Return the product ``grad.T @ x`` of the rows of every group, [g, o, i]."""
        ...

    def accumulate_grouped_product_(
        self, total_goi: Tensor, grad_so: Tensor, x_si: Tensor, ends_g: Tensor, *, begins: bool
    ) -> None:
        """Add ``grouped_weight_product`` to a sum, or overwrite it if the sum ``begins``."""
        ...


def product(x_si: Tensor, weight_gio: Tensor, ends_g: Tensor) -> Tensor:
    """Return every row times the matrix of its group, [s, o].

    Args:
        x_si: activations.
        weight_gio: a matrix for each group; a transposed view is taken as it is.
        ends_g: int32, the row behind the last of each group, ascending; the last one is s.
    """
    if has_function(x_si, weight_gio[0]):
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
    if has_function(grad_so, x_si):
        made: Tensor = functional.grouped_mm(grad_so.T, x_si, offs=ends_g)
        return made
    return weight_product_by_group(grad_so, x_si, ends_g)


def product_by_group(x_si: Tensor, weight_gio: Tensor, ends_g: Tensor) -> Tensor:
    """As ``product``, group by group: the specification. The host waits for the device."""
    out_so = x_si.new_empty(len(x_si), weight_gio.shape[2])
    for matrix_io, (begin, end) in zip(weight_gio, bounds(ends_g), strict=True):
        torch.mm(x_si[begin:end], matrix_io, out=out_so[begin:end])
    return out_so


def weight_product_by_group(grad_so: Tensor, x_si: Tensor, ends_g: Tensor) -> Tensor:
    """As ``weight_product``, group by group; a group without rows has a gradient of zeros."""
    return torch.stack([grad_so[a:b].T @ x_si[a:b] for a, b in bounds(ends_g)])


def bounds(ends_g: Tensor) -> list[tuple[int, int]]:
    """Return the first row of every group, and the row behind its last."""
    return list(pairwise([0, *ends_g.tolist()]))


def has_function(*factors: Tensor) -> bool:
    """Return whether PyTorch's function takes the factors, whose rows must begin at 16 bytes."""
    return hasattr(functional, "grouped_mm") and all(  # PyTorch 2.10 and newer have it
        factor.dtype in _TYPES
        and max(factor.stride()) * factor.element_size() % _BYTES_AT_ONCE == 0
        and min(factor.shape) > 0
        for factor in factors
    )
