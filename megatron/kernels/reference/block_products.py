"""Products in 8 bits with scales of blocks: a loop over groups, each by PyTorch's own operations.

This is the recipe ``blockwise`` of Transformer Engine (arXiv 2412.19437, section 3.3.2). A row of
an input or of a gradient has one scale for every 128 numbers, and a weight one for every square of
128 x 128. All scales are powers of two. So a worth times a number of 8 bits is exact in fp32, and
the loop multiplies such products as they are. A linear layer is a single group with all rows.

Blocks along rows differ from blocks along columns: rows and turned rows are both rounded from the
unrounded tensor.

Shapes: s rows of all groups, g groups, i inputs, o outputs, k any width, n rows of a matrix, p
places (``block_places`` in ``kernels/eight_bits.py``).
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from megatron.kernels.eight_bits import BLOCK, EightBits, block_places, powers_of_two
from megatron.kernels.grouped import bounds
from megatron.kernels.reference.products import ProductOperations


class BlockOperations(ProductOperations):
    """The part of ``Kernels`` about scales of blocks; nothing has a gradient."""

    def quantise_blocks(
        self,
        x_sk: Tensor,
        ends_g: Tensor | None,
        dtype: torch.dtype,
        *,
        straight: bool,
        turned: bool,
    ) -> tuple[EightBits | None, EightBits | None]:
        """Round rows of groups, with a scale for every ``BLOCK`` numbers of a result's row.

        Infinity and NaN become NaN, and no other number is too large.

        Args:
            x_sk: activations; the rows of a group lie one after the other, in the groups' order.
            ends_g: int32, for every group the row after its last one; the last number is s.
                ``None``: there is one group.
            dtype: e4m3 or e5m2.
            straight: return the result [s, k] first; otherwise ``None``.
            turned: return the rows as columns [k, p] second; otherwise ``None``. Blocks of columns
                begin where groups begin. With one group p is s.
        """
        straight_sk = self._in_blocks(x_sk, 1, dtype) if straight else None
        return straight_sk, self._turned(x_sk, ends_g, dtype) if turned else None

    def quantise_squares(self, x_gnk: Tensor, dtype: torch.dtype) -> tuple[EightBits, EightBits]:
        """Round matrices, with a scale for every square: return [g, n, k] and turned [g, k, n].

        Args:
            x_gnk: activations, contiguous.
            dtype: e4m3 or e5m2.
        """
        found = [self._in_blocks(x_nk, BLOCK, dtype) for x_nk in x_gnk]
        bits_gnk, worth_gbc = (
            torch.stack(each)
            for each in ([own.bits for own in found], [own.worth.T for own in found])
        )
        turned_gkn = bits_gnk.transpose(1, 2).contiguous()
        return (
            EightBits(bits_gnk, worth_gbc),
            EightBits(turned_gkn, worth_gbc.transpose(1, 2).contiguous()),
        )

    def grouped_block_product(
        self,
        left: EightBits,
        right: EightBits,
        ends_g: Tensor | None,
        dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return every row times the rows of its group's matrix, [s, n], rounded once.

        Args:
            left: [s, k], from ``quantise_blocks``; k is a multiple of 16.
            right: [g, n, k], from ``quantise_squares``; one factor at most is e5m2.
            ends_g: as in ``quantise_blocks``.
            dtype: type of activations.
            bias: activations [n], added to every row.
        """
        rows, columns = len(left.bits), right.bits.shape[1]
        out_sn = torch.empty(rows, columns, dtype=dtype, device=left.bits.device)
        for group, (begin, end) in enumerate(_bounds(rows, ends_g)):
            if begin == end:
                continue
            own = EightBits(left.bits[begin:end], left.worth[:, begin:end])
            matrix = EightBits(right.bits[group], right.worth[group].T)
            total = _values(own, 1) @ _values(matrix, BLOCK).T
            out_sn[begin:end] = total if bias is None else total.add_(bias)
        return out_sn

    def grouped_block_weight_product(
        self, grad: EightBits, x: EightBits, ends_g: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Return ``grad.T @ x`` of every group's rows, [g, o, i]; a group without rows gets zeros.

        Args:
            grad: [o, p], turned.
            x: [i, p], turned.
            ends_g: as in ``quantise_blocks``.
            dtype: type of the result.
        """
        (o, p), i = grad.bits.shape, len(x.bits)
        groups = 1 if ends_g is None else len(ends_g)
        out_goi = torch.zeros(groups, o, i, dtype=dtype, device=x.bits.device)
        for group, (first, last) in enumerate(_columns(p, ends_g)):
            if first < last:
                own, other = (_values(_cut(each, first, last), 1) for each in (grad, x))
                out_goi[group] = own @ other.T
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
        """``total += grouped_block_weight_product(...)``.

        Args:
            total_goi: contiguous, as in ``accumulate_``.
            grad: as in ``grouped_block_weight_product``.
            x: as in ``grouped_block_weight_product``.
            ends_g: as in ``quantise_blocks``.
            begins: as in ``accumulate_product_``.
        """
        product_goi = self.grouped_block_weight_product(grad, x, ends_g, total_goi.dtype)
        if begins:
            total_goi.copy_(product_goi)
        else:
            self.accumulate_(total_goi, product_goi)

    def _turned(self, x_sk: Tensor, ends_g: Tensor | None, dtype: torch.dtype) -> EightBits:
        """Return rows as columns, every group by itself; see ``quantise_blocks``."""
        s, k = x_sk.shape
        places = s if ends_g is None else block_places(s, len(ends_g))
        bits_kp = x_sk.new_zeros(k, places).to(dtype)
        worth_ck = torch.ones(-(-places // BLOCK), k, device=x_sk.device)
        columns = _columns(s, ends_g)
        for begin, end in _bounds(s, ends_g):
            first, last = next(columns)
            if begin < end:
                own = self._in_blocks(x_sk[begin:end].T, 1, dtype)
                bits_kp[:, first:last] = own.bits
                worth_ck[first // BLOCK :][: len(own.worth)] = own.worth
        return EightBits(bits_kp, worth_ck)

    def _in_blocks(self, x_rk: Tensor, height: int, dtype: torch.dtype) -> EightBits:
        """Round a matrix in blocks of ``height`` rows and ``BLOCK`` columns; worths are [c, b]."""
        r, k = x_rk.shape
        # Zeros raise no magnitude, and are cut off again.
        whole = functional.pad(x_rk, (0, -k % BLOCK, 0, -r % height))
        blocks = whole.reshape(len(whole) // height, height, -1, BLOCK)
        scale, worth = powers_of_two(blocks.abs().amax((1, 3), keepdim=True), dtype)
        bits, _ = self.quantise(blocks, scale, dtype, straight=True, turned=False)
        assert bits is not None
        return EightBits(
            bits.view(whole.shape)[:r, :k].contiguous(), worth[:, 0, :, 0].T.contiguous()
        )


def _values(factor: EightBits, height: int) -> Tensor:
    """Return the numbers that a factor stands for, fp32; blocks have ``height`` rows."""
    r, k = factor.bits.shape
    worth_rc = factor.worth.T.repeat_interleave(height, 0)[:r]
    return factor.bits.float() * worth_rc.repeat_interleave(BLOCK, 1)[:, :k]


def _cut(turned: EightBits, first: int, last: int) -> EightBits:
    """Return a group's columns of a turned factor."""
    blocks = slice(first // BLOCK, -(-last // BLOCK))
    return EightBits(turned.bits[:, first:last], turned.worth[blocks])


def _bounds(rows: int, ends_g: Tensor | None) -> list[tuple[int, int]]:
    """Return every group's first row, and the row behind its last."""
    return [(0, rows)] if ends_g is None else list(bounds(ends_g))


def _columns(rows: int, ends_g: Tensor | None) -> Iterator[tuple[int, int]]:
    """Yield every group's first column where rows are turned, and the column behind its last."""
    first = 0
    for begin, end in _bounds(rows, ends_g):
        yield first, first + end - begin
        first += -(-(end - begin) // BLOCK) * BLOCK
