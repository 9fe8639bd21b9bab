"""Parts of matrices are put together, and cut apart again, whatever way ranks share them."""

from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
from harness.rank_pool import RankError, RankPool
from torch import Tensor, nn

from megatron.layers.main_grad import give_main_grad
from megatron.model.ownership import OwnedParameter
from megatron.optimizer.parameters import ParameterPart
from megatron.optimizer.whole_matrices import WholeMatrices
from megatron.parallel.box import Piece, shard
from megatron.parallel.grid import Grid
from megatron.parallel.groups import make_groups

SHAPE = (8, 12)
CUTS = {"rows": (0, 1), "columns": (1, 1), "two in one": (0, 2)}
"""The dimension that is cut, and the number of matrices side by side."""


def part_of(name: str, pieces: Sequence[Piece]) -> ParameterPart:
    local = torch.zeros(tuple(max(piece.local.stop[d] for piece in pieces) for d in range(2)))
    give_main_grad(parameter := nn.Parameter(local), torch.zeros_like(local))
    owned = OwnedParameter(name, parameter, SHAPE, tuple(pieces))
    return ParameterPart.whole(owned)


def put_together(rank: int, world_size: int, *, loses: bool = False) -> list[tuple[Tensor, bool]]:
    """Every whole matrix on this rank, and whether its own part comes out of it again."""
    grid = Grid(tensor_size=world_size)
    axis = make_groups(grid, torch.device("cpu"), timedelta(seconds=60)).tensor_sums
    parts = [
        part_of(name, shard(SHAPE, dimension, 0 if loses else rank, world_size, fused))
        for name, (dimension, fused) in CUTS.items()
    ]
    matrices, found = WholeMatrices(parts, axis), []
    expected = torch.arange(96.0).view(SHAPE)
    for part in parts:
        own = torch.zeros_like(part.weight)
        for piece in part.pieces:
            own[piece.local.slices] = expected[piece.box.slices]
        whole = matrices.gathered(part, own)
        found.append((whole, torch.equal(matrices.own_part(part, whole), own)))
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_has_the_whole(size: int, ranks: RankPool) -> None:
    for found in ranks.run(put_together, size):
        for whole, comes_out_again in found:
            assert torch.equal(whole, torch.arange(96.0).view(SHAPE))
            assert comes_out_again


def test_parts_that_are_not_the_whole_are_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="overlap"):
        ranks.run(put_together, 2, loses=True)
