"""Tiles of the logits of a shard, which share the memory of one tile if logits are not kept.

Shapes: n tokens, v rows of a shard.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from megatron.kernels.cuda.sizes import slice_tokens


class Tile(NamedTuple):
    """A part of the logits: some rows with all tokens, or all rows with some tokens."""

    rows: slice
    tokens: slice

    @property
    def begins(self) -> bool:
        """Whether sums over the rows begin with this tile."""
        return bool(self.rows.start == 0)


def whole(logits_vn: Tensor) -> Tile:
    """Return the tile of all rows with all tokens."""
    rows, tokens = logits_vn.shape
    return Tile(slice(0, rows), slice(0, tokens))


def tiles(
    room: Tensor, rows: int, tokens: int, *, by_tokens: bool
) -> Iterator[tuple[Tile, Tensor]]:
    """Yield tiles of the logits, and contiguous memory for each of them.

    Args:
        room: memory [rows of a tile, n].
        rows: v, at least 1.
        tokens: n.
        by_tokens: rather cut the tokens, unless a tile would have too few of them.
    """
    at_once = slice_tokens(rows, tokens, room.numel()) if by_tokens else 0
    if at_once:
        cut = [Tile(slice(0, rows), part) for part in _parts(tokens, at_once)]
    else:
        cut = [Tile(part, slice(0, tokens)) for part in _parts(rows, len(room))]
    for tile in cut:
        shape = [each.stop - each.start for each in tile]
        yield tile, room.view(-1)[: shape[0] * shape[1]].view(shape)


def _parts(length: int, at_once: int) -> Iterator[slice]:
    for begin in range(0, length, at_once):
        yield slice(begin, min(length, begin + at_once))
