"""Sums of gradients, products in 8 bits and steps of AdamW, in PyTorch's own operations.

Numbers of 8 bits are emulated: factors are rounded as a GPU rounds them, and multiplied in fp32.
Every number of 8 bits is one of fp32, and so is every product of two. So the results differ from a
GPU's in the order of the sums only.

Shapes and types: as in ``megatron.kernels.face``; r rows, k numbers of a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.kernels import grouped
from megatron.kernels.adamw import AdamWStep, AdamWTensors
from megatron.kernels.eight_bits import EightBits, largest_number
from megatron.kernels.reference import optimizer


class GradientOperations:
    """Operations that are not differentiable; they work in the calling thread."""

    def accumulate_(self, total: Tensor, part: Tensor) -> None:
        """``total += part``: one microbatch's gradient joins the sum over microbatches.

        Args:
            total: the sum so far, of any shape with a first dimension, with any strides.
            part: of the same shape; an activation, or of the type of ``total``.
        """
        total.add_(part)

    def accumulate_product_(
        self, total: Tensor, left: Tensor, right: Tensor, *, begins: bool = False
    ) -> None:
        """``total += left @ right``, the product rounded to the activations' type at most.

        Args:
            total: [i, j], as in ``accumulate_``.
            left: activations [i, n].
            right: activations [n, j].
            begins: the sum begins with this product: what ``total`` holds does not count.
        """
        if begins:
            total.copy_(left @ right)
        else:
            self.accumulate_(total, left @ right)

    def grouped_product(self, x_si: Tensor, weight_gio: Tensor, ends_g: Tensor) -> Tensor:
        """Return every row times the matrix of its group, [s, o].

        Args:
            x_si: activations; the rows of a group lie one after the other, in the groups' order.
            weight_gio: activations, a matrix for each of g groups; it may be a transposed view.
            ends_g: int32, the row behind the last one of every group; the last of them is s.
        """
        return grouped.product_by_group(x_si, weight_gio, ends_g)

    def grouped_weight_product(self, grad_so: Tensor, x_si: Tensor, ends_g: Tensor) -> Tensor:
        """Return ``grad.T @ x`` of the rows of every group, [g, o, i]; without rows it is zero.

        Args:
            grad_so: activations, contiguous.
            x_si: activations, contiguous.
            ends_g: as in ``grouped_product``.
        """
        return grouped.weight_product_by_group(grad_so, x_si, ends_g)

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
        """``x * scale``, rounded to the nearest number of 8 bits.

        What is too large becomes the largest number; infinity and NaN become NaN, so that what is
        computed with them shows it.

        Args:
            x_rk: activations.
            scale: fp32 [].
            dtype: e4m3 or e5m2.
            straight: whether [r, k] is asked for.
            turned: whether [k, r] is asked for, as dense.
            seen: fp32 [], is raised to the largest magnitude in x if that is greater.
        """
        if seen is not None:
            torch.maximum(seen, self.largest(x_rk), out=seen)
        most = largest_number(dtype)
        scaled_rk = x_rk.float().mul(scale).clamp_(-most, most)
        bits_rk = scaled_rk.masked_fill_(x_rk.isinf(), torch.nan).to(dtype)
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
        """``left @ right.T + bias`` by rows of both, rounded once.

        Args:
            left: [i, k]; all sizes are multiples of ``MULTIPLE``.
            right: [j, k]; not both are e5m2.
            dtype: of the result [i, j]: an activation or a statistic.
            bias: activations [j].
            quick: sums may be formed in fewer bits than fp32 where that is faster: on Hopper.
        """
        total = left.bits_rk.float() @ right.bits_rk.float().T
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
        """``total += left @ right.T``, the product rounded to ``dtype`` at most.

        Args:
            total: [i, j], as in ``accumulate_``.
            left: [i, k].
            right: [j, k].
            dtype: of activations.
            begins: as in ``accumulate_product_``.
        """
        product = self.eight_bit_product(left, right, total.dtype)
        if begins:
            total.copy_(product)
        else:
            self.accumulate_(total, product)

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum of the squares of all elements, float64 [], in an order that is fixed.

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
            tensors: at least one of each; the masters are statistics.
            step: its numbers.
        """
        optimizer.adamw_(tensors, step)
