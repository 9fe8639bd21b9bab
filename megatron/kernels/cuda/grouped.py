"""Products of groups of rows on a GPU: PyTorch's kernel where it has one, else Triton's.

PyTorch has one kernel for all groups in bf16 on Hopper and Blackwell of data centres. Elsewhere
PyTorch asks the device how many rows each group has, and the host waits. The programs here read the
ends of the groups on the device. They also form all gradients of weights, because they add to a sum
in fp32 while they multiply. PyTorch's kernel would write a gradient in 16 bits, which would then be
read again. For a group without rows the program itself writes a gradient of zeros.

Shapes: s rows of all groups, g groups, i inputs, o outputs.
"""

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from megatron.kernels import grouped
from megatron.kernels.cuda.library import Programs, operator
from megatron.kernels.cuda.operators import LAUNCH as COMMON
from megatron.kernels.cuda.sizes import next_power_of_2, quotient
from megatron.kernels.declared import of_groups

programs = Programs("grouped")

TILE: Final = {"ROWS": 128, "COLUMNS": 128, "DEPTH": 64}
"""Of a product in 16 bits."""
WIDE_TILE: Final = {"ROWS": 64, "COLUMNS": 64, "DEPTH": 16}
"""Of a product in fp32, which tensor cores would round."""
SHARED: Final = 8
"""Tiles of rows that follow each other before the next columns begin."""
LAUNCH: Final = {**COMMON, "num_warps": 8}

_WITH_KERNEL: Final = (9, 10)
"""Major compute capabilities of Hopper and Blackwell of data centres."""


def tile_of(dtype: torch.dtype) -> dict[str, int]:
    """Return the rows and columns of a program's result, and the depth of its factors."""
    return WIDE_TILE if dtype == torch.float32 else TILE


def has_kernel(device: torch.device) -> bool:
    """Return whether PyTorch has a kernel for all groups on a GPU, for which no host waits."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device)[0] in _WITH_KERNEL


@operator(
    "grouped_product(Tensor(a!) out_so, Tensor x_si, Tensor weight_gio, Tensor ends_g) -> ()",
    lambda x_si, weight_gio, ends_g, **_: of_groups(x_si, weight_gio, len(ends_g)),
)
def grouped_product(out_so: Tensor, x_si: Tensor, weight_gio: Tensor, ends_g: Tensor) -> None:
    """See ``programs.grouped``; the matrices are dense, or transposed views of dense ones."""
    (s, i), (g, _, o) = x_si.shape, weight_gio.shape
    tile = tile_of(x_si.dtype)
    turned = not weight_gio.is_contiguous()
    assert x_si.is_contiguous()
    assert not turned or weight_gio.transpose(1, 2).is_contiguous()
    # each group may end with a tile that is not full
    row_tiles = quotient(quotient(s, tile["ROWS"]) + g, SHARED) * SHARED
    programs.grouped_product[(row_tiles * quotient(o, tile["COLUMNS"]),)](
        out_so,
        x_si,
        weight_gio,
        ends_g,
        g,
        o,
        i,
        TURNED=turned,
        GROUPS=next_power_of_2(g),
        SHARED=SHARED,
        **tile,
        **LAUNCH,
    )


@operator(
    "grouped_weight_product(Tensor(a!) out_goi, Tensor grad_so, Tensor x_si, Tensor ends_g) -> ()",
    lambda grad_so, x_si, ends_g, **_: of_groups(grad_so, x_si, len(ends_g)),
)
def grouped_weight_product(out_goi: Tensor, grad_so: Tensor, x_si: Tensor, ends_g: Tensor) -> None:
    """See ``programs.grouped``."""
    _multiply_weights(out_goi, grad_so, x_si, ends_g, adds=False)


@operator(
    "add_grouped_weight_product_(Tensor(a!) total_goi, Tensor grad_so, Tensor x_si, Tensor ends_g) "
    "-> ()",
    lambda grad_so, x_si, ends_g, **_: of_groups(grad_so, x_si, len(ends_g)),
)
def add_grouped_weight_product_(
    total_goi: Tensor, grad_so: Tensor, x_si: Tensor, ends_g: Tensor
) -> None:
    """See ``programs.grouped``."""
    _multiply_weights(total_goi, grad_so, x_si, ends_g, adds=True)


def _multiply_weights(
    out_goi: Tensor, grad_so: Tensor, x_si: Tensor, ends_g: Tensor, *, adds: bool
) -> None:
    g, o, i = out_goi.shape
    tile = tile_of(x_si.dtype)
    assert out_goi.is_contiguous()
    assert grad_so.is_contiguous()
    assert x_si.is_contiguous()
    tiles = quotient(o, tile["ROWS"]) * quotient(i, tile["COLUMNS"])
    programs.grouped_weight_product[(tiles, g)](
        out_goi, grad_so, x_si, ends_g, o, i, ADDS=adds, **tile, **LAUNCH
    )


class CudaGrouped:
    """The part of ``Kernels`` about products of groups.

    Args:
        device: where the factors live.
    """

    def __init__(self, device: torch.device) -> None:
        self._has_grouped = has_kernel(device)

    def grouped_product(self, x_si: Tensor, weight_gio: Tensor, ends_g: Tensor) -> Tensor:
        """See ``Kernels``."""
        has_kernel = self._has_grouped and x_si.dtype == torch.bfloat16
        if has_kernel and grouped.has_function(x_si, weight_gio[0]):
            return self._grouped_mm(x_si, weight_gio, ends_g)
        out_so = x_si.new_empty(len(x_si), weight_gio.shape[2])
        grouped_product(out_so, x_si.contiguous(), weight_gio, ends_g)
        return out_so

    def _grouped_mm(self, x_si: Tensor, weight_gio: Tensor, ends_g: Tensor) -> Tensor:
        made: Tensor = functional.grouped_mm(x_si, weight_gio, offs=ends_g)
        return made

    def grouped_weight_product(self, grad_so: Tensor, x_si: Tensor, ends_g: Tensor) -> Tensor:
        """See ``Kernels``."""
        out_goi = x_si.new_empty(len(ends_g), grad_so.shape[1], x_si.shape[1])
        grouped_weight_product(out_goi, grad_so, x_si, ends_g)
        return out_goi

    def accumulate_grouped_product_(
        self, total_goi: Tensor, grad_so: Tensor, x_si: Tensor, ends_g: Tensor, *, begins: bool
    ) -> None:
        """See ``Kernels``."""
        multiply = grouped_weight_product if begins else add_grouped_weight_product_
        multiply(total_goi, grad_so, x_si, ends_g)
