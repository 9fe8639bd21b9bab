"""Two levels bring what one collective over all ranks would."""

from datetime import timedelta

import pytest
import torch
from harness.rank_pool import RankPool
from torch import Tensor

from megatron.parallel import collectives
from megatron.parallel.grid import Grid
from megatron.parallel.groups import make_groups
from megatron.parallel.two_level import TwoLevels

CPU = torch.device("cpu")
SHAPE = (6, 4)
GRIDS = [Grid(1, 1, 3), Grid(2, 1, 2), Grid(4, 1, 1), Grid(2, 2, 1), Grid(1, 1, 1)]


def own_values(replica: int, k: int) -> Tensor:
    """Numbers that floats add up exactly, and that are different everywhere."""
    return torch.arange(24.0).view(SHAPE) + 100 * k + 10_000 * replica


def use_levels(
    rank: int, world_size: int, *, grid: Grid, root: int, wants_parts: bool
) -> dict[str, Tensor]:
    groups = make_groups(grid, CPU, timedelta(seconds=60))
    levels = TwoLevels(groups.row, groups.column, wants_parts)
    at = grid.coordinates(rank)
    k = grid.vocabulary_rank(at.pipeline, at.tensor)
    held = own_values(at.data, grid.vocabulary_rank(root))
    whole = held if at.pipeline == root else torch.full(SHAPE, -1.0)
    own = own_values(at.data, k)
    return {
        "broadcast": levels.broadcast(whole.clone(), root),
        "reduce": levels.reduce(own.clone(), root),
        "maximum": levels.combine(own.clone(), collectives.MAXIMUM),
        "sum": levels.combine(own.clone(), collectives.SUM),
        "rows": levels.merge(own, lambda row_t: row_t.sum(0), lambda sums_p: sums_p),
    }


@pytest.mark.parametrize("wants_parts", [False, True])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_rank_gets_what_is_for_it(grid: Grid, wants_parts: bool, ranks: RankPool) -> None:
    for root in {0, grid.pipeline_size - 1}:
        by_rank = ranks.run(
            use_levels, grid.world_size, grid=grid, root=root, wants_parts=wants_parts
        )
        for rank, found in enumerate(by_rank):
            at = grid.coordinates(rank)
            places = range(grid.tensor_size * grid.pipeline_size)
            everyone = [own_values(at.data, k) for k in places]
            total = torch.stack(everyone).sum(0)
            held = own_values(at.data, grid.vocabulary_rank(root))
            assert torch.equal(found["broadcast"], held)
            assert torch.equal(found["sum"], total)
            assert torch.equal(found["maximum"], everyone[-1])
            rows = torch.stack(everyone).view(grid.pipeline_size, grid.tensor_size, *SHAPE)
            assert torch.equal(found["rows"], rows.sum(1))
            if at.pipeline != root:
                continue
            if wants_parts and grid.tensor_size > 1:
                part = total.view(grid.tensor_size, -1)[at.tensor]
                assert torch.equal(found["reduce"], part)
                assert found["reduce"].untyped_storage().nbytes() == part.nbytes
            else:
                assert torch.equal(found["reduce"], total)
