"""Products in 8 bits with scales of blocks on a GPU: Triton rounds the factors and multiplies them.

Linear layers and experts use the same programs: a linear layer is one group with all rows. A
program adds to a sum of gradients in fp32 while it multiplies, and the host does not wait for the
sizes of groups. Products of a linear layer are cuBLAS's where it has them. cuBLAS does not add in 8
bits, so an addition follows its gradients of weights, if there are enough rows to make up for it.

Shapes: as in ``programs/block_products.py``.
"""

from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from megatron.kernels.cuda.grouped import SHARED
from megatron.kernels.cuda.library import Programs, operator
from megatron.kernels.cuda.operators import LAUNCH as COMMON
from megatron.kernels.cuda.sizes import next_power_of_2, quotient
from megatron.kernels.declared import LaunchWork, of_groups, of_rows, of_turned_groups
from megatron.kernels.eight_bits import (
    BLOCK,
    E5M2,
    MULTIPLE,
    EightBits,
    block_places,
    largest_number,
)

programs = Programs("block_products")

TILE: Final = {"ROWS": BLOCK, "COLUMNS": BLOCK}
"""Numbers that a program rounds at a time."""
PRODUCT_TILE: Final = {**TILE, "DEPTH": BLOCK}
LAUNCH: Final = {**COMMON, "num_warps": 8}
ROUNDING_LAUNCH: Final = {**COMMON, "num_warps": 16}
"""More warps, so that a thread has few of the tile's numbers in its registers."""
LEAST_ROWS: Final = 4096
"""Rows from which cuBLAS's gradient of a weight and an addition are quicker than the program that
adds. On one H200 (4,096 inputs, 16,384 outputs) they took 734 us for 884 with 4,096 rows, and 1,225
for 1,805 with 8,192. Lines through these times meet near 2,700 rows: the addition takes as long for
few rows as for many."""
HOPPER: Final = 9
"""Major compute capability of the GPUs for which cuBLAS has scales of blocks in fp32."""


@operator(
    "quantise_blocks(Tensor(a!)? straight_sk, Tensor(b!)? straight_worth_cs, "
    "Tensor(c!)? turned_kp, Tensor(d!)? turned_worth_bk, Tensor x_sk, Tensor? ends_g) -> ()"
)
def quantise_blocks(
    straight_sk: Tensor | None,
    straight_worth_cs: Tensor | None,
    turned_kp: Tensor | None,
    turned_worth_bk: Tensor | None,
    x_sk: Tensor,
    ends_g: Tensor | None,
) -> None:
    """See ``programs.block_products``; a result whose tensors are ``None`` is not formed."""
    s, k = x_sk.shape
    assert x_sk.is_contiguous()
    out = straight_sk if straight_sk is not None else turned_kp
    assert out is not None
    groups = 1 if ends_g is None else len(ends_g)
    tiles = quotient(s, TILE["ROWS"]) + (0 if ends_g is None else groups)
    programs.quantise_blocks[(tiles, quotient(k, TILE["COLUMNS"]))](
        x_sk if straight_sk is None else straight_sk.view(torch.uint8),
        x_sk if straight_worth_cs is None else straight_worth_cs,
        x_sk if turned_kp is None else turned_kp.view(torch.uint8),
        x_sk if turned_worth_bk is None else turned_worth_bk,
        x_sk,
        x_sk if ends_g is None else ends_g,
        s,
        groups,
        k,
        0 if turned_kp is None else turned_kp.shape[1],
        MOST=largest_number(out.dtype),
        E5M2=out.dtype == E5M2,
        STRAIGHT=straight_sk is not None,
        TURNED=turned_kp is not None,
        WHOLE=ends_g is None,
        GROUPS=next_power_of_2(groups),
        **TILE,
        **ROUNDING_LAUNCH,
    )


@operator(
    "quantise_squares(Tensor(a!) straight_gnk, Tensor(b!) turned_gkn, Tensor(c!) worth_gbc, "
    "Tensor(d!) turned_worth_gcb, Tensor x_gnk) -> ()"
)
def quantise_squares(
    straight_gnk: Tensor,
    turned_gkn: Tensor,
    worth_gbc: Tensor,
    turned_worth_gcb: Tensor,
    x_gnk: Tensor,
) -> None:
    """See ``programs.block_products``."""
    g, n, k = x_gnk.shape
    assert x_gnk.is_contiguous()
    programs.quantise_squares[(*worth_gbc.shape[1:], g)](
        straight_gnk.view(torch.uint8),
        turned_gkn.view(torch.uint8),
        worth_gbc,
        turned_worth_gcb,
        x_gnk,
        n,
        k,
        MOST=largest_number(straight_gnk.dtype),
        E5M2=straight_gnk.dtype == E5M2,
        **TILE,
        **ROUNDING_LAUNCH,
    )


@operator(
    "grouped_block_product(Tensor(a!) out_sn, Tensor left_sk, Tensor left_worth_cs, "
    "Tensor right_gnk, Tensor right_worth_gbc, Tensor? bias_n, Tensor? ends_g) -> ()",
    lambda left_sk, right_gnk, **_: of_groups(left_sk, right_gnk.mT, len(right_gnk)),
)
def grouped_block_product(
    out_sn: Tensor,
    left_sk: Tensor,
    left_worth_cs: Tensor,
    right_gnk: Tensor,
    right_worth_gbc: Tensor,
    bias_n: Tensor | None,
    ends_g: Tensor | None,
) -> None:
    """See ``programs.block_products``."""
    (s, k), (g, n, _), tile = left_sk.shape, right_gnk.shape, PRODUCT_TILE
    assert left_sk.is_contiguous()
    assert right_gnk.is_contiguous()
    assert k % MULTIPLE == 0, k
    assert g == 1 or ends_g is not None, g
    rows = quotient(s, tile["ROWS"]) + (0 if ends_g is None else g)
    programs.grouped_block_product[(quotient(rows, SHARED) * SHARED * quotient(n, BLOCK),)](
        out_sn,
        left_sk,
        left_worth_cs,
        right_gnk,
        right_worth_gbc,
        left_sk if bias_n is None else bias_n,
        left_sk if ends_g is None else ends_g,
        s,
        g,
        n,
        k,
        BIAS=bias_n is not None,
        WHOLE=ends_g is None,
        GROUPS=next_power_of_2(g),
        SHARED=SHARED,
        **tile,
        **LAUNCH,
    )


@operator(
    "block_product(Tensor(a!) out_sn, Tensor left_sk, Tensor left_worth_cs, Tensor right_nk, "
    "Tensor right_worth_bc, Tensor? bias_n) -> ()",
    lambda left_sk, right_nk, **_: of_rows(left_sk, right_nk, "8 bits by blocks"),
)
def block_product(
    out_sn: Tensor,
    left_sk: Tensor,
    left_worth_cs: Tensor,
    right_nk: Tensor,
    right_worth_bc: Tensor,
    bias_n: Tensor | None,
) -> None:
    """Multiply one group with all rows: by cuBLAS, if it has a product for it, or by Triton.

    Both give the same bits (on one H200: docs/benchmarks/2026-11-26-h200-layouts).
    """
    if not (has_block_products(out_sn.device) and cublas_takes(out_sn, left_sk, right_nk, bias_n)):
        factors = left_sk, left_worth_cs, right_nk[None], right_worth_bc[None]
        grouped_block_product(out_sn, *factors, bias_n, None)
        return
    torch._scaled_mm(
        left_sk,
        right_nk.T,
        left_worth_cs.T,
        right_worth_bc.T,
        bias=bias_n,
        out_dtype=out_sn.dtype,
        out=out_sn,
    )


@cache
def has_block_products(device: torch.device) -> bool:
    """Return whether cuBLAS multiplies with scales of blocks there: on Hopper, since CUDA 12.9."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    version = tuple(map(int, torch.version.cuda.split(".")[:2]))
    return version >= (12, 9) and torch.cuda.get_device_capability(device)[0] == HOPPER


def cublas_takes(out_sn: Tensor, left_sk: Tensor, right_nk: Tensor, bias_n: Tensor | None) -> bool:
    """Return whether cuBLAS has a product for such factors; narrower than what its manual demands.

    Rows of scales begin at multiples of 16 bytes: that is of four scales.
    """
    (s, k), n = left_sk.shape, len(right_nk)
    fits = s % MULTIPLE == 0 and n % BLOCK == 0 and k % (4 * BLOCK) == 0
    return fits and (bias_n is None or bias_n.dtype == out_sn.dtype == torch.bfloat16)


_FACTORS: Final = (
    "Tensor grad_op, Tensor grad_worth_bo, Tensor x_ip, Tensor x_worth_bi, Tensor? ends_g) -> ()"
)


def _work_of_weights(out_goi: Tensor, x_ip: Tensor, **_: Any) -> LaunchWork:
    return of_turned_groups(out_goi, x_ip, block_places(0, len(out_goi)))


@operator(f"grouped_block_weight_product(Tensor(a!) out_goi, {_FACTORS}", _work_of_weights)
def grouped_block_weight_product(out_goi: Tensor, *factors: Any) -> None:
    """See ``programs.block_products``."""
    _multiply_weights(out_goi, *factors, adds=False)


@operator(
    f"add_grouped_block_weight_product_(Tensor(a!) total_goi, {_FACTORS}",
    lambda total_goi, **given: _work_of_weights(total_goi, **given),
)
def add_grouped_block_weight_product_(total_goi: Tensor, *factors: Any) -> None:
    """See ``programs.block_products``."""
    _multiply_weights(total_goi, *factors, adds=True)


def _multiply_weights(
    out_goi: Tensor,
    grad_op: Tensor,
    grad_worth_bo: Tensor,
    x_ip: Tensor,
    x_worth_bi: Tensor,
    ends_g: Tensor | None,
    *,
    adds: bool,
) -> None:
    (g, o, i), p, tile = out_goi.shape, x_ip.shape[1], PRODUCT_TILE
    assert out_goi.is_contiguous()
    assert grad_op.is_contiguous()
    assert x_ip.is_contiguous()
    assert p % MULTIPLE == 0, p
    tiles = quotient(o, tile["ROWS"]) * quotient(i, tile["COLUMNS"])
    programs.grouped_block_weight_product[(tiles, g)](
        out_goi,
        grad_op,
        grad_worth_bo,
        x_ip,
        x_worth_bi,
        grad_op if ends_g is None else ends_g,
        g,
        o,
        i,
        p,
        ADDS=adds,
        WHOLE=ends_g is None,
        GROUPS=next_power_of_2(g),
        **tile,
        **LAUNCH,
    )


@operator(
    "block_weight_product(Tensor(a!) out_oi, Tensor grad_op, Tensor grad_worth_bo, Tensor x_ip, "
    "Tensor x_worth_bi) -> ()",
    lambda grad_op, x_ip, **_: of_rows(grad_op, x_ip, "8-bit weight gradients by blocks"),
)
def block_weight_product(
    out_oi: Tensor, grad_op: Tensor, grad_worth_bo: Tensor, x_ip: Tensor, x_worth_bi: Tensor
) -> None:
    """Form the gradient of a linear layer's weight by cuBLAS, which has to have the product.

    Triton's is the same to the bit (on one H200: docs/benchmarks/2026-11-26-h200-layouts).
    """
    torch._scaled_mm(
        grad_op, x_ip.T, grad_worth_bo.T, x_worth_bi, out_dtype=out_oi.dtype, out=out_oi
    )


def cublas_takes_weights(grad_op: Tensor, x_ip: Tensor) -> bool:
    """Return whether cuBLAS has the gradient of a weight; narrower than what its manual demands."""
    (o, p), i = grad_op.shape, len(x_ip)
    return o % BLOCK == 0 and i % BLOCK == 0 and p % BLOCK == 0


class CudaBlocks:
    """The operations with scales of blocks on a GPU; ``Kernels`` describes each.

    Attributes:
        has_block_products: whether cuBLAS multiplies with scales of blocks on the GPU.
    """

    has_block_products = False

    def quantise_blocks(
        self,
        x_sk: Tensor,
        ends_g: Tensor | None,
        dtype: torch.dtype,
        *,
        straight: bool,
        turned: bool,
    ) -> tuple[EightBits | None, EightBits | None]:
        """See ``Kernels``."""
        (s, k), device = x_sk.shape, x_sk.device
        places = s if ends_g is None else block_places(s, len(ends_g))
        by_rows = _empty(s, k, dtype, device) if straight else None
        by_columns = _empty(k, places, dtype, device) if turned else None
        results: list[Tensor | None] = []
        for made in (by_rows, by_columns):
            results += (None, None) if made is None else (made.bits, made.worth)
        quantise_blocks(*results, x_sk.contiguous(), ends_g)
        return by_rows, by_columns

    def quantise_squares(self, x_gnk: Tensor, dtype: torch.dtype) -> tuple[EightBits, EightBits]:
        """See ``Kernels``."""
        g, n, k = x_gnk.shape
        b, c = quotient(n, BLOCK), quotient(k, BLOCK)
        straight_gnk, turned_gkn = (
            x_gnk.new_empty(shape, dtype=dtype) for shape in ((g, n, k), (g, k, n))
        )
        worth_gbc, turned_worth_gcb = (
            x_gnk.new_empty(shape, dtype=torch.float32) for shape in ((g, b, c), (g, c, b))
        )
        quantise_squares(straight_gnk, turned_gkn, worth_gbc, turned_worth_gcb, x_gnk.contiguous())
        return EightBits(straight_gnk, worth_gbc), EightBits(turned_gkn, turned_worth_gcb)

    def grouped_block_product(
        self,
        left: EightBits,
        right: EightBits,
        ends_g: Tensor | None,
        dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> Tensor:
        """See ``Kernels``."""
        size = len(left.bits), right.bits.shape[1]
        out_sn = torch.empty(size, dtype=dtype, device=left.bits.device)
        factors = left.bits, left.worth, right.bits, right.worth
        if ends_g is None:
            block_product(out_sn, *factors[:2], right.bits[0], right.worth[0], bias)
        else:
            grouped_block_product(out_sn, *factors, bias, ends_g)
        return out_sn

    def grouped_block_weight_product(
        self, grad: EightBits, x: EightBits, ends_g: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """See ``Kernels``."""
        size = 1 if ends_g is None else len(ends_g), len(grad.bits), len(x.bits)
        out_goi = torch.empty(size, dtype=dtype, device=x.bits.device)
        self.accumulate_grouped_block_product_(out_goi, grad, x, ends_g, begins=True)
        return out_goi

    def accumulate_grouped_block_product_(
        self,
        total_goi: Tensor,
        grad: EightBits,
        x: EightBits,
        ends_g: Tensor | None,
        *,
        begins: bool,
    ) -> None:
        """See ``Kernels``; cuBLAS's product lies in a matrix of its own before it is added."""
        factors = grad.bits, grad.worth, x.bits, x.worth
        by_cublas = self.has_block_products and ends_g is None
        if by_cublas and cublas_takes_weights(grad.bits, x.bits):
            [total_oi] = total_goi
            if begins:
                block_weight_product(total_oi, *factors)
                return
            if grad.bits.shape[1] >= LEAST_ROWS:
                product_oi = total_oi.new_empty(total_oi.shape, dtype=torch.float32)
                block_weight_product(product_oi, *factors)
                total_oi.add_(product_oi)
                return
        multiply = grouped_block_weight_product if begins else add_grouped_block_weight_product_
        multiply(total_goi, *factors, ends_g)


def _empty(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> EightBits:
    """Return a factor without values, for rows that have scales of blocks."""
    bits = torch.empty(rows, columns, dtype=dtype, device=device)
    return EightBits(bits, torch.empty(quotient(columns, BLOCK), rows, device=device))
