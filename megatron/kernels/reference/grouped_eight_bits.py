"""Products of groups in 8 bits: a loop over the groups, each by the operations of a single matrix.

The loop is the specification. The host waits for the sizes of the groups.

Shapes: s rows of all groups, g groups, i inputs, o outputs, k any width, n rows of a matrix, p
places (``kernels/eight_bits.py``).
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from megatron.kernels.eight_bits import MULTIPLE, EightBits, places
from megatron.kernels.grouped import bounds
from megatron.kernels.reference.products import ProductOperations


class GroupedEightBitOperations(ProductOperations):
    """The part of ``Kernels`` about products of groups in 8 bits; nothing has a gradient."""

    def largest_of_groups(self, x_sk: Tensor, ends_g: Tensor) -> Tensor:
        """Return the largest magnitude of each group, fp32 [g]; 0 for a group without rows.

        Args:
            x_sk: activations; the rows of a group lie one after the other, in the groups' order.
            ends_g: int32, for every group the row after its last one; the last number is s.
        """
        found_g = torch.zeros(len(ends_g), device=x_sk.device)
        for group, (begin, end) in enumerate(bounds(ends_g)):
            if begin < end:
                found_g[group] = self.largest(x_sk[begin:end])
        return found_g

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
        """As ``quantise``, with a scale for each group.

        Args:
            x_sk: as in ``largest_of_groups``.
            scale_g: fp32.
            ends_g: as in ``largest_of_groups``.
            dtype: e4m3 or e5m2.
            straight: return the result [s, k] first; otherwise ``None``.
            turned: return the rows as columns [k, p] second; otherwise ``None``. Numbers after the
                last group's gap are undefined.
            seen_g: fp32, contiguous; each is raised to the largest magnitude of its group.
        """
        size = x_sk.shape[1], places(len(x_sk), len(ends_g))
        straight_sk = x_sk.new_empty(x_sk.shape, dtype=dtype) if straight else None
        turned_kp = x_sk.new_zeros(size).to(dtype) if turned else None
        columns = _columns(ends_g)
        for group, (begin, end) in enumerate(bounds(ends_g)):
            first, last = next(columns)
            if begin == end:
                continue
            seen = None if seen_g is None else seen_g[group]
            bits_rk, _ = self.quantise(
                x_sk[begin:end], scale_g[group], dtype, straight=True, turned=False, seen=seen
            )
            assert bits_rk is not None
            if straight_sk is not None:
                straight_sk[begin:end] = bits_rk
            if turned_kp is not None:
                turned_kp[:, first:last] = bits_rk.T
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
        """As ``quantise``, for a matrix for each group: return [g, n, k] and [g, k, n].

        Args:
            x_gnk: activations, contiguous.
            scale_g: fp32.
            ends_g: int32: n, 2 n, ..., g n.
            dtype: e4m3 or e5m2.
            seen_g: as in ``quantise_groups``.
        """
        straight, turned = [], []
        for group, x_nk in enumerate(x_gnk):
            seen = None if seen_g is None else seen_g[group]
            one, other = self.quantise(
                x_nk, scale_g[group], dtype, straight=True, turned=True, seen=seen
            )
            assert one is not None
            assert other is not None
            straight.append(one)
            turned.append(other)
        return torch.stack(straight), torch.stack(turned)

    def grouped_eight_bit_product(
        self,
        left: EightBits,
        right: EightBits,
        ends_g: Tensor,
        dtype: torch.dtype,
        *,
        quick: bool = False,
    ) -> Tensor:
        """Return every row times the rows of its group's matrix, [s, n].

        Args:
            left: [s, k], with rows as in ``largest_of_groups``; k is a multiple of ``MULTIPLE``.
            right: [g, n, k]; at most one of the two factors is e5m2.
            ends_g: as in ``largest_of_groups``.
            dtype: type of activations.
            quick: as in ``eight_bit_product``.
        """
        size = len(left.bits), right.bits.shape[1]
        out_sn = torch.empty(size, dtype=dtype, device=left.bits.device)
        for group, (begin, end) in enumerate(bounds(ends_g)):
            if begin < end:
                own = EightBits(left.bits[begin:end], left.worth[group])
                matrix = EightBits(right.bits[group], right.worth[group])
                out_sn[begin:end] = self.eight_bit_product(own, matrix, dtype, quick=quick)
        return out_sn

    def grouped_eight_bit_weight_product(
        self, grad: EightBits, x: EightBits, ends_g: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Return ``grad.T @ x`` of every group's rows, [g, o, i]; a group without rows gets zeros.

        Args:
            grad: [o, p], turned.
            x: [i, p], turned.
            ends_g: as in ``largest_of_groups``.
            dtype: type of the result.
        """
        size = len(ends_g), len(grad.bits), len(x.bits)
        out_goi = torch.zeros(size, dtype=dtype, device=x.bits.device)
        for group, (first, last) in enumerate(_columns(ends_g)):
            if first < last:
                own, other = (
                    EightBits(each.bits[:, first:last], each.worth[group]) for each in (grad, x)
                )
                out_goi[group] = self.eight_bit_product(own, other, dtype)
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
        """``total += grouped_eight_bit_weight_product(...)``.

        Args:
            total_goi: contiguous, as in ``accumulate_``.
            grad: as in ``grouped_eight_bit_weight_product``.
            x: as in ``grouped_eight_bit_weight_product``.
            ends_g: as in ``largest_of_groups``.
            begins: as in ``accumulate_product_``.
        """
        product_goi = self.grouped_eight_bit_weight_product(grad, x, ends_g, total_goi.dtype)
        if begins:
            total_goi.copy_(product_goi)
        else:
            self.accumulate_(total_goi, product_goi)


def _columns(ends_g: Tensor) -> Iterator[tuple[int, int]]:
    """Yield every group's first column where rows are turned, and the column behind its last."""
    first = 0
    for begin, end in pairwise([0, *ends_g.tolist()]):
        yield first, first + end - begin
        first += -(-(end - begin) // MULTIPLE) * MULTIPLE
