"""Products of groups in 8 bits on a GPU: Triton rounds the factors and multiplies them.

PyTorch's ``_scaled_grouped_mm`` takes factors of e4m3 only, one scale for each row, and for the
gradients of weights only groups whose sizes are multiples of 16. The programs here take e5m2 too
and groups of any size, and they add to a sum of gradients in fp32 while they multiply. The host
does not wait for the sizes of the groups.

Shapes: as in ``programs/grouped_eight_bits.py``.
"""

from typing import Any, Final

import torch
from torch import Tensor

from megatron.kernels.cuda.grouped import SHARED
from megatron.kernels.cuda.library import Programs, operator
from megatron.kernels.cuda.operators import LAUNCH as COMMON
from megatron.kernels.cuda.sizes import next_power_of_2, quotient
from megatron.kernels.declared import LaunchWork, of_groups, of_turned_groups
from megatron.kernels.eight_bits import E5M2, MULTIPLE, EightBits, largest_number, places

programs = Programs("grouped_eight_bits")

TILE: Final = {"ROWS": 64, "COLUMNS": 64}
"""Numbers that a program rounds at a time."""
PRODUCT_TILE: Final = {"ROWS": 128, "COLUMNS": 128, "DEPTH": 128}
LAUNCH: Final = {**COMMON, "num_warps": 8}


@operator(
    "quantise_groups(Tensor(a!)? straight_sk, Tensor(b!)? turned, Tensor(c!)? seen_g, "
    "Tensor x_sk, Tensor? scale_g, Tensor ends_g) -> ()"
)
def quantise_groups(
    straight_sk: Tensor | None,
    turned: Tensor | None,
    seen_g: Tensor | None,
    x_sk: Tensor,
    scale_g: Tensor | None,
    ends_g: Tensor,
) -> None:
    """See ``programs.grouped_eight_bits``; a result whose tensor is ``None`` is not formed."""
    (s, k), g = x_sk.shape, len(ends_g)
    assert x_sk.is_contiguous()
    assert seen_g is None or seen_g.is_contiguous()
    assert scale_g is None or scale_g.is_contiguous()
    out = straight_sk if straight_sk is not None else turned
    programs.quantise_groups[(quotient(s, TILE["ROWS"]) + g, quotient(k, TILE["COLUMNS"]))](
        x_sk if straight_sk is None else straight_sk.view(torch.uint8),
        x_sk if turned is None else turned.view(torch.uint8),
        x_sk if seen_g is None else seen_g.view(torch.int32),
        x_sk,
        x_sk if scale_g is None else scale_g,
        ends_g,
        g,
        k,
        0 if turned is None else turned.shape[-1],
        MOST=0.0 if out is None else largest_number(out.dtype),
        E5M2=out is not None and out.dtype == E5M2,
        STRAIGHT=straight_sk is not None,
        TURNED=turned is not None,
        APART=turned is not None and turned.dim() == 3,
        SEEN=seen_g is not None,
        GROUPS=next_power_of_2(g),
        **TILE,
        **LAUNCH,
    )


@operator(
    "grouped_eight_bit_product(Tensor(a!) out_sn, Tensor left_sk, Tensor left_worth_g, "
    "Tensor right_gnk, Tensor right_worth_g, Tensor ends_g, bool quick) -> ()",
    lambda left_sk, right_gnk, **_: of_groups(left_sk, right_gnk.mT, len(right_gnk)),
)
def grouped_eight_bit_product(
    out_sn: Tensor,
    left_sk: Tensor,
    left_worth_g: Tensor,
    right_gnk: Tensor,
    right_worth_g: Tensor,
    ends_g: Tensor,
    quick: bool,
) -> None:
    """See ``programs.grouped_eight_bits``."""
    (s, k), (g, n, _), tile = left_sk.shape, right_gnk.shape, PRODUCT_TILE
    assert left_sk.is_contiguous()
    assert right_gnk.is_contiguous()
    assert k % MULTIPLE == 0, k
    row_tiles = quotient(quotient(s, tile["ROWS"]) + g, SHARED) * SHARED
    programs.grouped_eight_bit_product[(row_tiles * quotient(n, tile["COLUMNS"]),)](
        out_sn,
        left_sk,
        left_worth_g,
        right_gnk,
        right_worth_g,
        ends_g,
        g,
        n,
        k,
        QUICK=quick,
        GROUPS=next_power_of_2(g),
        SHARED=SHARED,
        **tile,
        **LAUNCH,
    )


_FACTORS: Final = (
    "Tensor grad_op, Tensor grad_worth_g, Tensor x_ip, Tensor x_worth_g, Tensor ends_g) -> ()"
)


def _work_of_weights(out_goi: Tensor, x_ip: Tensor, **_: Any) -> LaunchWork:
    return of_turned_groups(out_goi, x_ip, places(0, len(out_goi)))


@operator(f"grouped_eight_bit_weight_product(Tensor(a!) out_goi, {_FACTORS}", _work_of_weights)
def grouped_eight_bit_weight_product(out_goi: Tensor, *factors: Tensor) -> None:
    """See ``programs.grouped_eight_bits``."""
    _multiply_weights(out_goi, *factors, adds=False)


@operator(
    f"add_grouped_eight_bit_weight_product_(Tensor(a!) total_goi, {_FACTORS}",
    lambda total_goi, **given: _work_of_weights(total_goi, **given),
)
def add_grouped_eight_bit_weight_product_(total_goi: Tensor, *factors: Tensor) -> None:
    """See ``programs.grouped_eight_bits``."""
    _multiply_weights(total_goi, *factors, adds=True)


def _multiply_weights(
    out_goi: Tensor,
    grad_op: Tensor,
    grad_worth_g: Tensor,
    x_ip: Tensor,
    x_worth_g: Tensor,
    ends_g: Tensor,
    *,
    adds: bool,
) -> None:
    (g, o, i), tile = out_goi.shape, PRODUCT_TILE
    assert out_goi.is_contiguous()
    assert grad_op.is_contiguous()
    assert x_ip.is_contiguous()
    tiles = quotient(o, tile["ROWS"]) * quotient(i, tile["COLUMNS"])
    programs.grouped_eight_bit_weight_product[(tiles, g)](
        out_goi,
        grad_op,
        grad_worth_g,
        x_ip,
        x_worth_g,
        ends_g,
        g,
        o,
        i,
        x_ip.shape[1],
        ADDS=adds,
        GROUPS=next_power_of_2(g),
        **tile,
        **LAUNCH,
    )


class CudaGroupedEightBits:
    """The operations on groups in 8 bits on a GPU; ``Kernels`` describes each."""

    def largest_of_groups(self, x_sk: Tensor, ends_g: Tensor) -> Tensor:
        """See ``Kernels``."""
        seen_g = torch.zeros(len(ends_g), device=x_sk.device)
        quantise_groups(None, None, seen_g, x_sk.contiguous(), None, ends_g)
        return seen_g

    def quantise_groups(
        self,
        x_sk: Tensor,
        scale_g: Tensor,
        ends_g: Tensor,
        dtype: torch.dtype,
        *,
        straight: bool,
        turned: bool,
        seen_g: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """See ``Kernels``."""
        size = x_sk.shape[1], places(len(x_sk), len(ends_g))
        straight_sk = x_sk.new_empty(x_sk.shape, dtype=dtype) if straight else None
        turned_kp = x_sk.new_empty(size, dtype=dtype) if turned else None
        quantise_groups(straight_sk, turned_kp, seen_g, x_sk.contiguous(), scale_g, ends_g)
        return straight_sk, turned_kp

    def quantise_matrices(
        self,
        x_gnk: Tensor,
        scale_g: Tensor,
        ends_g: Tensor,
        dtype: torch.dtype,
        *,
        seen_g: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See ``Kernels``."""
        g, n, k = x_gnk.shape
        straight_gnk = x_gnk.new_empty((g, n, k), dtype=dtype)
        turned_gkn = x_gnk.new_empty((g, k, n), dtype=dtype)
        rows = straight_gnk.flatten(0, 1)
        quantise_groups(rows, turned_gkn, seen_g, x_gnk.flatten(0, 1), scale_g, ends_g)
        return straight_gnk, turned_gkn

    def grouped_eight_bit_product(
        self,
        left: EightBits,
        right: EightBits,
        ends_g: Tensor,
        dtype: torch.dtype,
        *,
        quick: bool = False,
    ) -> Tensor:
        """See ``Kernels``."""
        size = len(left.bits), right.bits.shape[1]
        out_sn = torch.empty(size, dtype=dtype, device=left.bits.device)
        factors = left.bits, left.worth, right.bits, right.worth
        grouped_eight_bit_product(out_sn, *factors, ends_g, quick)
        return out_sn

    def grouped_eight_bit_weight_product(
        self, grad: EightBits, x: EightBits, ends_g: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """See ``Kernels``."""
        size = len(ends_g), len(grad.bits), len(x.bits)
        out_goi = torch.empty(size, dtype=dtype, device=x.bits.device)
        self.accumulate_grouped_eight_bit_product_(out_goi, grad, x, ends_g, begins=True)
        return out_goi

    def accumulate_grouped_eight_bit_product_(
        self,
        total_goi: Tensor,
        grad: EightBits,
        x: EightBits,
        ends_g: Tensor,
        *,
        begins: bool,
    ) -> None:
        """See ``Kernels``."""
        multiply = (
            grouped_eight_bit_weight_product if begins else add_grouped_eight_bit_weight_product_
        )
        multiply(total_goi, grad.bits, grad.worth, x.bits, x.worth, ends_g)
