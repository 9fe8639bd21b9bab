"""Products in 8 bits on a GPU: Triton rounds the factors, and cuBLAS multiplies them.

cuBLAS adds up along the rows of both factors. Unlike with 16 bits, it cannot add a product to an
earlier sum: the product is written, and read again for the addition.
"""

from typing import Final

import torch
from torch import Tensor

from megatron.kernels.cuda.library import Programs, operator
from megatron.kernels.cuda.operators import LAUNCH as COMMON
from megatron.kernels.cuda.row_operators import as_rows
from megatron.kernels.cuda.sizes import quotient
from megatron.kernels.declared import of_rows
from megatron.kernels.eight_bits import E5M2, MULTIPLE, EightBits, largest_number

programs = Programs("eight_bits")

TILE: Final = {"ROWS": 64, "COLUMNS": 64}
"""Numbers that a program works on at a time: 16 for each of 256 threads, 64 bytes in a row of 8
bits."""
LAUNCH: Final = {**COMMON, "num_warps": 8}


@operator(
    "quantise(Tensor(a!)? straight_rk, Tensor(b!)? turned_kr, Tensor(c!)? seen, Tensor x_rk, "
    "Tensor? scale) -> ()"
)
def quantise(
    straight_rk: Tensor | None,
    turned_kr: Tensor | None,
    seen: Tensor | None,
    x_rk: Tensor,
    scale: Tensor | None,
) -> None:
    """See ``programs.eight_bits``; a result whose tensor is ``None`` is not formed."""
    r, k = x_rk.shape
    out = straight_rk if straight_rk is not None else turned_kr
    programs.quantise[(quotient(r, TILE["ROWS"]), quotient(k, TILE["COLUMNS"]))](
        x_rk if straight_rk is None else straight_rk.view(torch.uint8),
        x_rk if turned_kr is None else turned_kr.view(torch.uint8),
        x_rk if seen is None else seen.view(torch.int32),
        x_rk,
        x_rk if scale is None else scale,
        r,
        k,
        x_rk.stride(0),
        MOST=0.0 if out is None else largest_number(out.dtype),
        E5M2=out is not None and out.dtype == E5M2,
        STRAIGHT=straight_rk is not None,
        TURNED=turned_kr is not None,
        SEEN=seen is not None,
        **TILE,
        **LAUNCH,
    )


@operator(
    "eight_bit_product(Tensor(a!) out, Tensor left_ik, Tensor left_worth, Tensor right_jk, "
    "Tensor right_worth, Tensor? bias_j, bool quick) -> ()",
    lambda left_ik, right_jk, **_: of_rows(left_ik, right_jk, "8 bits"),
)
def eight_bit_product(
    out: Tensor,
    left_ik: Tensor,
    left_worth: Tensor,
    right_jk: Tensor,
    right_worth: Tensor,
    bias_j: Tensor | None,
    quick: bool,
) -> None:
    """See ``Kernels.eight_bit_product``."""
    assert left_ik.is_contiguous()
    assert right_jk.is_contiguous()
    assert left_ik.shape[1] % MULTIPLE == len(right_jk) % MULTIPLE == 0, "cuBLAS needs it"
    for worth in (left_worth, right_worth):
        assert worth.is_meta or worth.data_ptr() % 16 == 0, "cuBLAS has no product for it"
    torch._scaled_mm(
        left_ik,
        right_jk.T,
        left_worth,
        right_worth,
        bias=bias_j,
        out_dtype=out.dtype,
        use_fast_accum=quick,
        out=out,
    )


class CudaEightBits:
    """The operations in 8 bits on a GPU; ``Kernels`` describes each."""

    def largest(self, x: Tensor) -> Tensor:
        """See ``Kernels``."""
        seen = torch.zeros((), device=x.device)
        quantise(None, None, seen, as_rows(x), None)
        return seen

    def quantise(
        self,
        x_rk: Tensor,
        scale: Tensor,
        dtype: torch.dtype,
        *,
        straight: bool,
        turned: bool,
        seen: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """See ``Kernels``."""
        r, k = x_rk.shape
        straight_rk = x_rk.new_empty((r, k), dtype=dtype) if straight else None
        turned_kr = x_rk.new_empty((k, r), dtype=dtype) if turned else None
        quantise(straight_rk, turned_kr, seen, as_rows(x_rk), scale)
        return straight_rk, turned_kr

    def eight_bit_product(
        self,
        left: EightBits,
        right: EightBits,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        *,
        quick: bool = False,
    ) -> Tensor:
        """See ``Kernels``."""
        size = len(left.bits), len(right.bits)
        out = torch.empty(size, dtype=dtype, device=left.bits.device)
        self._multiply(out, left, right, bias, quick=quick)
        return out

    def accumulate_eight_bit_product_(
        self,
        total: Tensor,
        left: EightBits,
        right: EightBits,
        dtype: torch.dtype,
        *,
        begins: bool = False,
    ) -> None:
        """See ``Kernels``."""
        if begins:
            self._multiply(total, left, right, None, quick=False)
        else:
            total.add_(self.eight_bit_product(left, right, dtype))

    def _multiply(
        self, out: Tensor, left: EightBits, right: EightBits, bias: Tensor | None, *, quick: bool
    ) -> None:
        eight_bit_product(out, left.bits, left.worth, right.bits, right.worth, bias, quick)
