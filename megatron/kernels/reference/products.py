"""Products of groups and in 8 bits, sums of rows and of squares, and steps of AdamW, in PyTorch.

Numbers of 8 bits are emulated: factors are rounded as a GPU rounds them, and multiplied in fp32.
fp32 holds every 8-bit number exactly, and every product of two. So the results differ from a GPU's
only by the order of the sums.

Shapes and types: as in ``megatron.kernels.face``; r rows, k numbers of a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.kernels import grouped
from megatron.kernels.accumulation import Accumulation
from megatron.kernels.adamw import AdamWStep, AdamWTensors
from megatron.kernels.eight_bits import EightBits, rounded
from megatron.kernels.reference import optimizer
from megatron.kernels.rows import local_rows


class ProductOperations(Accumulation):
    """Operations without a gradient; they run in the calling thread."""

    def wide_product(self, x_nk: Tensor, weight_jk: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``x @ weight.T`` in a wider type, of products and sums in this type.

        Args:
            x_nk: activations.
            weight_jk: activations.
            dtype: of the result [n, j]; at least as wide as that of activations.
        """
        return x_nk.to(dtype) @ weight_jk.to(dtype).T

    def grouped_product(self, x_si: Tensor, weight_gio: Tensor, ends_g: Tensor) -> Tensor:
        """Return every row times the matrix of its group, [s, o].

        Args:
            x_si: activations; the rows of a group lie one after the other, in the groups' order.
            weight_gio: activations, one matrix for each of g groups; it may be a transposed view.
            ends_g: int32, for every group the row after its last one; the last number is s.
        """
        return grouped.product_by_group(x_si, weight_gio, ends_g)

    def grouped_weight_product(self, grad_so: Tensor, x_si: Tensor, ends_g: Tensor) -> Tensor:
        """Return ``grad.T @ x`` of every group's rows, [g, o, i]; a group without rows gets zeros.

        Args:
            grad_so: activations, contiguous.
            x_si: activations, contiguous.
            ends_g: as in ``grouped_product``.
        """
        return grouped.weight_product_by_group(grad_so, x_si, ends_g)

    def accumulate_grouped_product_(
        self, total_goi: Tensor, grad_so: Tensor, x_si: Tensor, ends_g: Tensor, *, begins: bool
    ) -> None:
        """``total += grouped_weight_product(...)``; the product may be rounded to activations.

        Args:
            total_goi: contiguous, as in ``accumulate_``.
            grad_so: as in ``grouped_weight_product``.
            x_si: as in ``grouped_weight_product``.
            ends_g: as in ``grouped_product``.
            begins: the sum begins with this product, and the old content of ``total`` is ignored.
        """
        product_goi = self.grouped_weight_product(grad_so, x_si, ends_g)
        if begins:
            total_goi.copy_(product_goi)
        else:
            self.accumulate_(total_goi, product_goi)

    def largest(self, x: Tensor) -> Tensor:
        """Return the largest magnitude of all elements, fp32 []; undefined if one is NaN."""
        found: Tensor = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
        return found

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
        """Return ``x * scale``, rounded to the nearest 8-bit numbers.

        A number that is too large becomes the largest one. Infinity and NaN become NaN, so that
        later results show the fault.

        Args:
            x_rk: activations.
            scale: fp32 [].
            dtype: e4m3 or e5m2.
            straight: return the result [r, k] first; otherwise ``None``.
            turned: return its transpose [k, r] second, dense; otherwise ``None``.
            seen: fp32 []; it is raised to the largest magnitude in ``x`` if that is greater.
        """
        if seen is not None:
            torch.maximum(seen, self.largest(x_rk), out=seen)
        bits_rk = rounded(x_rk, scale, dtype)
        return bits_rk if straight else None, bits_rk.T.contiguous() if turned else None

    def eight_bit_product(
        self,
        left: EightBits,
        right: EightBits,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        *,
        quick: bool = False,
    ) -> Tensor:
        """Return ``left @ right.T + bias``, rounded once.

        Args:
            left: [i, k]; all sizes are multiples of ``MULTIPLE``.
            right: [j, k]; at most one of the two factors is e5m2.
            dtype: type of the result [i, j]: that of activations or of statistics.
            bias: activations [j].
            quick: sums may have fewer bits than fp32 where that is faster, which is on Hopper.
        """
        total = left.bits.float() @ right.bits.float().T
        total.mul_(left.worth).mul_(right.worth)
        return (total if bias is None else total.add_(bias)).to(dtype)

    def accumulate_eight_bit_product_(
        self,
        total: Tensor,
        left: EightBits,
        right: EightBits,
        dtype: torch.dtype,
        *,
        begins: bool = False,
    ) -> None:
        """``total += left @ right.T``; the product may be rounded to ``dtype``.

        Args:
            total: [i, j], as in ``accumulate_``.
            left: [i, k].
            right: [j, k].
            dtype: type of activations.
            begins: as in ``accumulate_product_``.
        """
        product = self.eight_bit_product(left, right, total.dtype)
        if begins:
            total.copy_(product)
        else:
            self.accumulate_(total, product)

    def add_rows_(self, total_vh: Tensor, ids_n: Tensor, x_nh: Tensor, first_row: int) -> None:
        """Add every row of ``x`` to the row of a vocabulary shard that its id names.

        Rows whose ids belong to other shards are left out.

        Args:
            total_vh: a sum of gradients, contiguous, of any floating type.
            ids_n: int64; an id may stand there several times.
            x_nh: activations.
            first_row: vocabulary id of the shard's first row.
        """
        row_n, owned_n = local_rows(ids_n, first_row, len(total_vh))
        part_nh = x_nh.to(total_vh.dtype, copy=True).mul_(owned_n.unsqueeze(-1))
        total_vh.index_add_(0, row_n, part_nh)

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum of the squares of all elements, float64 [], added up in a fixed order.

        Args:
            tensors: at least one, contiguous, of any floating types; read once.
        """
        total = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
        for tensor in tensors:
            total += optimizer.sum_of_squares(tensor)
        return total

    def adamw_(self, tensors: AdamWTensors, step: AdamWStep) -> None:
        """Take a step of AdamW and round the masters to the weights.

        Args:
            tensors: at least one master; the masters have the type of statistics.
            step: the numbers of the step.
        """
        optimizer.adamw_(tensors, step)
