"""Weights of which a layer reads 8 bits alone: how a part of their rows is scaled and rounded.

Replicas that share an optimizer update parts of a weight, and gather all parts. If they gather 8
bits, each rounds its own rows. The numbers of a *block* have one scale, and another replica may
have some of them. So the replicas first agree on the largest magnitude of every block; then each
knows all scales, and no scale is gathered. The bits are those that the layer's multiplier makes of
the whole weight.

Shapes: g matrices of n rows, one below the other; r some of these rows, k numbers of a row; a
matrix has b x c blocks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megatron.kernels.eight_bits import BLOCK, powers_of_two, rounded
from megatron.layers.scales import WEIGHT, LayerScales, Scale, scale_of

AT_ONCE: Final = 1 << 24
"""Numbers that are scaled at a time; they need some copies in fp32 meanwhile."""


class _Cut(NamedTuple):
    """Rows of one matrix: its number, its rows ``first`` to ``last`` - 1, and where they lie."""

    matrix: int
    first: int
    last: int
    at: slice


@dataclass(frozen=True)
class GatheredWeight:
    """A weight of which its layer reads 8 bits alone.

    Attributes:
        matrices: number g of matrices that lie one below the other.
        rows: number n of rows of a matrix.
        columns: number k.
        in_squares: every square of 128 x 128 numbers is a block, with a power of two as its scale;
            otherwise every matrix is a block.
        dtype: of 8 bits.
        give: gives the layer the weight: bits [g n, k] and worths fp32 [g, b, c]. Their values may
            change between iterations, but not their memory.
        delayed: the layer's scales from earlier iterations, if it has such scales. They change at
            the end of every iteration; then the weight must be rounded anew.
    """

    matrices: int
    rows: int
    columns: int
    in_squares: bool
    dtype: torch.dtype
    give: Callable[[Tensor, Tensor], None]
    delayed: LayerScales | None = None

    @property
    def blocks(self) -> tuple[int, int, int]:
        """The numbers g, b and c."""
        height, width = self._block
        return self.matrices, -(-self.rows // height), -(-self.columns // width)

    def without_values(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return bits and worths as ``give`` takes them, whose values are undefined."""
        size = self.matrices * self.rows, self.columns
        bits_rk = torch.empty(size, dtype=self.dtype, device=device)
        return bits_rk, torch.empty(self.blocks, device=device)

    def raise_to_largest(self, largest_gbc: Tensor, rows_rk: Tensor, first: int) -> None:
        """Raise magnitudes of blocks to those in some rows of the weight.

        Args:
            largest_gbc: fp32; infinite where a block has an infinite number or NaN.
            rows_rk: the rows, not rounded to 8 bits.
            first: number of the first of them, from 0 to g n - 1.
        """
        height, _ = self._block
        for cut in self._cuts(first, len(rows_rk)):
            of_rows_rc = torch.linalg.vector_norm(
                self._in_widths(rows_rk[cut.at]), torch.inf, dim=2, dtype=torch.float32
            )
            of_rows_rc.nan_to_num_(nan=torch.inf, posinf=torch.inf)
            above, top = cut.first % height, cut.first // height
            padded_rc = functional.pad(of_rows_rc, (0, 0, above, -cut.last % height))
            found_bc = padded_rc.unflatten(0, (-1, height)).amax(1)
            place_bc = largest_gbc[cut.matrix, top : top + len(found_bc)]
            torch.maximum(place_bc, found_bc, out=place_bc)

    def scales(self, largest_gbc: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales and the worths of all blocks, of the shape of their magnitudes."""
        if self.in_squares:
            return powers_of_two(largest_gbc, self.dtype)
        found = self._known or scale_of(largest_gbc, self.dtype)
        shape = largest_gbc.shape
        return found.scale.reshape(shape), found.worth.reshape(shape)

    @property
    def needs_magnitudes(self) -> bool:
        """Whether the scales depend on the weight, and not on earlier iterations alone."""
        return self._known is None

    def note(self, largest_gbc: Tensor) -> None:
        """Note the magnitudes of this rank's rows for scales of later iterations."""
        if self.delayed is not None:
            self.delayed.note(WEIGHT, largest_gbc)

    @property
    def _known(self) -> Scale | None:
        return None if self.delayed is None else self.delayed.known(WEIGHT)

    def round_rows(self, bits_rk: Tensor, rows_rk: Tensor, first: int, scale_gbc: Tensor) -> None:
        """Round some rows of the weight.

        Args:
            bits_rk: the result, of ``dtype``.
            rows_rk: as in ``raise_to_largest``.
            first: as in ``raise_to_largest``.
            scale_gbc: of all blocks.
        """
        height, _ = self._block
        for cut in self._cuts(first, len(rows_rk)):
            block_r = torch.arange(cut.first, cut.last, device=rows_rk.device) // height
            scale_rc = scale_gbc[cut.matrix][block_r]
            found = rounded(self._in_widths(rows_rk[cut.at]), scale_rc.unsqueeze(2), self.dtype)
            bits_rk[cut.at] = found.flatten(1)[:, : self.columns]

    @property
    def _block(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        return (BLOCK, BLOCK) if self.in_squares else (self.rows, self.columns)

    def _in_widths(self, rows_rk: Tensor) -> Tensor:
        """Return rows in c parts as wide as blocks, [r, c, width]; zeros fill the last part."""
        width = self._block[1]
        gap = -self.columns % width
        whole = functional.pad(rows_rk, (0, gap)) if gap else rows_rk
        return whole.view(len(whole), -1, width)

    def _cuts(self, first: int, count: int) -> Iterator[_Cut]:
        """Divide ``count`` rows from ``first`` on among the matrices, and into few at a time."""
        row, step = first, max(1, AT_ONCE // self.columns)
        while row < first + count:
            matrix, place = divmod(row, self.rows)
            more = min(step, self.rows - place, first + count - row)
            yield _Cut(matrix, place, place + more, slice(row - first, row - first + more))
            row += more
