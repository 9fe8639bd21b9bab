"""Microscaling: every 32 numbers of a row share a scale of 8 bits, a power of two (MXFP8).

The format is that of the OCP Microscaling Formats (MX) Specification v1.0, sections 5.2 and 6.3. A
number stands for its 8 bits (e4m3 or e5m2) times the scale of its group, 2 to an exponent in e8m0.

**The exponent is rounded up.** The specification proposes to divide by 2 to the exponent of the
group's largest magnitude, and then numbers above 1.75 times a power of two are cut off: 448 is the
largest e4m3, and it is 1.75 * 2^8. NVIDIA's tensor cores take any exponent, and Transformer Engine
takes the smallest one by which no number of the group is cut off. So does this project
(``powers_of_two`` in ``eight_bits.py``). A group whose numbers are all smaller than 2^-100 is
scaled as if 2^-100 were its largest.

**Scales lie in tiles**, as tensor cores of compute capability 10 read them (manual of cuBLAS, "1D
Block Scaling Factors Layout"): 128 rows by 4 groups, 512 bytes one after the other, in which rows
0, 32, 64 and 96 are neighbours. Tiles at the edges are whole, and their unused scales are those of
zeros.

Shapes: r rows, k numbers of a row, c groups of a row.
"""

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

GROUP: Final = 32
"""Numbers of a row that share a scale; the sizes of matrices are multiples of it."""

SCALE: Final = torch.float8_e8m0fnu
"""Type of scales: an exponent, 127 for 1."""

TILE_ROWS: Final = 128
TILE_GROUPS: Final = 4
"""Rows and groups whose scales make a tile."""

_NEIGHBOURS: Final = 4
"""Rows of a tile whose scales lie side by side."""


def scales(rows: int, columns: int) -> int:
    """Return how many scales the tiles of a matrix have."""
    groups = -(-columns // GROUP)
    return -(-rows // TILE_ROWS) * TILE_ROWS * (-(-groups // TILE_GROUPS) * TILE_GROUPS)


def in_tiles(exponent_rc: Tensor) -> Tensor:
    """Return scales in the order of tiles, flat and e8m0.

    Args:
        exponent_rc: the exponents with their offset; r and c fill whole tiles.
    """
    r, c = exponent_rc.shape
    parts = exponent_rc.view(r // TILE_ROWS, _NEIGHBOURS, -1, c // TILE_GROUPS, TILE_GROUPS)
    return parts.permute(0, 3, 2, 1, 4).flatten().to(torch.uint8).view(SCALE)


def out_of_tiles(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Return the scales [r, c] of a matrix [r, k] in fp32; the inverse of ``in_tiles``."""
    groups = columns // GROUP
    across = -(-groups // TILE_GROUPS)
    tiles = scale.float().view(-1, across, TILE_ROWS // _NEIGHBOURS, _NEIGHBOURS, TILE_GROUPS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1, across * TILE_GROUPS)[:rows, :groups]


def in_whole_tiles(x_rk: Tensor) -> Tensor:
    """Return a matrix with zeros behind its rows and columns, so that its tiles are whole."""
    r, k = x_rk.shape
    return functional.pad(x_rk, (0, -k % (GROUP * TILE_GROUPS), 0, -r % TILE_ROWS))
