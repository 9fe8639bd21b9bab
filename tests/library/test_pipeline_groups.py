"""A pipeline's own ranks make its groups, whatever other groups each of them is in."""

import pytest
import torch
import torch.distributed as dist
from harness.rank_pool import RankPool

from megatron.library.runner import pipeline_groups


def sums(rank: int, world_size: int, *, besides: tuple[int, ...]) -> list[float]:
    """Sum the ranks' numbers over every group of one of two pipelines.

    Args:
        rank: of the world.
        world_size: of it.
        besides: ranks that are each in a group of their own before, as often as they stand here.
    """
    pipelines = [dist.new_group(list(ranks)) for ranks in ((0, 2), (1, 3))]
    for alone in besides:
        dist.new_group([alone])
    groups = pipeline_groups(pipelines[rank % 2], 2, torch.device("cpu"))
    found = []
    for axis in (groups.pipeline, groups.column, groups.transfers):
        value = torch.tensor(float(rank))
        dist.all_reduce(value, group=axis.group)
        found.append(float(value))
    return found


@pytest.mark.parametrize("besides", [(), (0, 0, 3)], ids=["alike", "unlike"])
def test_ranks_in_different_numbers_of_groups_make_them(
    ranks: RankPool, besides: tuple[int, ...]
) -> None:
    found = ranks.run(sums, 4, besides=besides)
    assert found == [[2.0] * 3, [4.0] * 3] * 2
