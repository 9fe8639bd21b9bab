"""MXFP8 on a GPU: a Triton program rounds the factors with all scales, and cuBLAS multiplies them.

GPUs of compute capability 10 and later (Blackwell) multiply such factors. PyTorch's product in 8
bits cannot add to an earlier sum. So a weight's gradient is written in fp32, and read again for the
addition; the sum is rounded as if the product added to it.

Shapes: s rows, k numbers of a row, m and n rows of the factors of a product.
"""

from typing import Final

import torch
from torch import Tensor

from megatron.kernels.cuda.library import Programs, operator
from megatron.kernels.cuda.operators import LAUNCH as COMMON
from megatron.kernels.cuda.sizes import quotient
from megatron.kernels.declared import of_rows
from megatron.kernels.eight_bits import E5M2, EightBits, largest_number
from megatron.kernels.microscaling import GROUP, SCALE, TILE_ROWS, scales

programs = Programs("microscaling")

LAUNCH: Final = {**COMMON, "num_warps": 16}
"""As for squares of 128 x 128 with one scale: few of the numbers are in a thread's registers."""
LEAST_CAPABILITY: Final = (10, 0)
"""Least compute capability of GPUs whose tensor cores read a scale for every 32 numbers."""
LEAST_CUDA: Final = (12, 8)
"""First CUDA whose cuBLAS has the product."""


def lack_of_mx_products(device: torch.device | int) -> str | None:
    """Return why a GPU cannot multiply with scales of 32 numbers; ``None``: it can."""
    capability, cuda = torch.cuda.get_device_capability(device), torch.version.cuda
    if capability < LEAST_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {_dotted(capability)}, "
            "and tensor cores read one scale for 32 numbers from "
            f"{_dotted(LEAST_CAPABILITY)} on (Blackwell)"
        )
    if cuda is not None and tuple(map(int, cuda.split(".")[:2])) < LEAST_CUDA:
        since = _dotted(LEAST_CUDA)
        return f"PyTorch is built with CUDA {cuda}, and cuBLAS has the product since {since}"
    return None


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


@operator(
    "quantise_mx(Tensor(a!)? straight_sk, Tensor(b!)? straight_tiles, Tensor(c!)? turned_ks, "
    "Tensor(d!)? turned_tiles, Tensor x_sk) -> ()"
)
def quantise_mx(
    straight_sk: Tensor | None,
    straight_tiles: Tensor | None,
    turned_ks: Tensor | None,
    turned_tiles: Tensor | None,
    x_sk: Tensor,
) -> None:
    """See ``programs.microscaling``; a result whose tensors are ``None`` is not formed."""
    s, k = x_sk.shape
    assert x_sk.is_contiguous()
    assert straight_sk is None or k % GROUP == 0, k
    assert turned_ks is None or s % GROUP == 0, s
    out = straight_sk if straight_sk is not None else turned_ks
    assert out is not None
    results = (
        x_sk if each is None else each.view(torch.uint8)
        for each in (straight_sk, straight_tiles, turned_ks, turned_tiles)
    )
    programs.quantise_mx[(quotient(s, TILE_ROWS), quotient(k, TILE_ROWS))](
        *results,
        x_sk,
        s,
        k,
        MOST=largest_number(out.dtype),
        E5M2=out.dtype == E5M2,
        STRAIGHT=straight_sk is not None,
        TURNED=turned_ks is not None,
        **LAUNCH,
    )


@operator(
    "mx_product(Tensor(a!) out_mn, Tensor left_mk, Tensor left_tiles, Tensor right_nk, "
    "Tensor right_tiles, Tensor? bias_n) -> ()",
    lambda left_mk, right_nk, **_: of_rows(left_mk, right_nk, "MXFP8"),
)
def mx_product(
    out_mn: Tensor,
    left_mk: Tensor,
    left_tiles: Tensor,
    right_nk: Tensor,
    right_tiles: Tensor,
    bias_n: Tensor | None,
) -> None:
    """See ``Kernels.mx_product``; cuBLAS's conditions (PyTorch's ``ScaledBlas.cpp``) hold."""
    assert left_mk.is_contiguous()
    assert right_nk.is_contiguous()
    assert left_mk.shape[1] % GROUP == len(right_nk) % GROUP == 0, (left_mk.shape, right_nk.shape)
    assert bias_n is None or out_mn.dtype == bias_n.dtype == torch.bfloat16, "cuBLAS needs it"
    torch._scaled_mm(
        left_mk,
        right_nk.T,
        left_tiles,
        right_tiles,
        bias=bias_n,
        out_dtype=out_mn.dtype,
        out=out_mn,
    )


class CudaMicroscaling:
    """The operations with a scale for every 32 numbers on a GPU; ``Kernels`` describes each."""

    def quantise_mx(
        self, x_sk: Tensor, dtype: torch.dtype, *, straight: bool, turned: bool
    ) -> tuple[EightBits | None, EightBits | None]:
        """See ``Kernels``."""
        s, k = x_sk.shape
        by_rows = _empty(x_sk, s, k, dtype) if straight else None
        by_columns = _empty(x_sk, k, s, dtype) if turned else None
        results: list[Tensor | None] = []
        for made in (by_rows, by_columns):
            results += (None, None) if made is None else (made.bits, made.worth)
        quantise_mx(*results, x_sk.contiguous())
        return by_rows, by_columns

    def mx_product(
        self, left: EightBits, right: EightBits, dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """See ``Kernels``."""
        size = len(left.bits), len(right.bits)
        out_mn = torch.empty(size, dtype=dtype, device=left.bits.device)
        mx_product(out_mn, left.bits, left.worth, right.bits, right.worth, bias)
        return out_mn

    def accumulate_mx_product_(
        self, total: Tensor, left: EightBits, right: EightBits, *, begins: bool
    ) -> None:
        """See ``Kernels``; the product lies in a matrix of its own before it is added."""
        if begins:
            mx_product(total, left.bits, left.worth, right.bits, right.worth, None)
        else:
            total.add_(self.mx_product(left, right, torch.float32))


def _empty(x: Tensor, rows: int, columns: int, dtype: torch.dtype) -> EightBits:
    """Return a factor without values, beside ``x``."""
    tiles = x.new_empty(scales(rows, columns), dtype=SCALE)
    return EightBits(x.new_empty((rows, columns), dtype=dtype), tiles)
