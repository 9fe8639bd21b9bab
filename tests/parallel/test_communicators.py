"""The number of a rank's communicators, and the estimate of their memory."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.parallel.communicators import MIB, RECEIVER, SENDER, communicators
from megatron.parallel.grid import Grid
from megatron.parallel.groups import STATE, make_groups
from megatron.parallel.links import Link, in_rounds
from megatron.parallel.settings import BlockSettings

LIMITS = BlockSettings()


def straight(p: int) -> tuple[Link, ...]:
    """Return the links of p stages, one a rank."""
    forward = [Link("X", rank, rank + 1) for rank in range(p - 1)]
    return in_rounds([*forward, *(Link("G", own.receiver, own.sender) for own in forward)])


def v_shape(p: int) -> tuple[Link, ...]:
    """Return the links of 2p stages, down the ranks and up again."""
    back = [Link("X", rank + 1, rank) for rank in range(p - 1)]
    back += [Link("G", own.receiver, own.sender) for own in back]
    return in_rounds([*straight(p), *back])


def test_a_rank_alone_has_none() -> None:
    [alone] = communicators(Grid(), (0, 0), (), LIMITS)
    assert (alone.number, alone.estimated) == (0, 0.0)


def test_v_shape_with_all_axes_has_seventeen() -> None:
    """As counted by hand at p = 8, t = 8, d = 16: nine groups on NCCL, and eight links."""
    found = communicators(Grid(8, 16, 8), (0, 0), v_shape(8), LIMITS)
    assert [own.number for own in found] == [13, *[17] * 6, 13]


@pytest.mark.parametrize(
    ("grid", "links"),
    [
        (Grid(2, 2, 4), v_shape(4)),
        (Grid(1, 5, 2), straight(2)),
        (Grid(4, 1, 1), ()),
        (Grid(2, 2, 2, "tp-pp-dp", 2), straight(2)),
    ],
    ids=str,
)
def test_they_are_those_that_a_job_makes(
    grid: Grid, links: tuple[Link, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ``make_groups``, rank by rank."""
    made: list[tuple[str, list[int]]] = []

    def new_group(ranks: list[int], *_: Any, group_desc: str, **__: Any) -> None:
        made.append((group_desc, ranks))

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: grid.world_size)
    monkeypatch.setattr("megatron.parallel.groups.group_options", lambda *_: None)
    ends = 0, grid.pipeline_size - 1
    make_groups(grid, torch.device("cuda", 0), timedelta(1), ends, links, LIMITS)
    found = communicators(grid, ends, links, LIMITS)
    for rank in range(grid.world_size):
        own = sum(rank in ranks for use, ranks in made if use != STATE)
        assert found[grid.coordinates(rank).pipeline].number == own


def test_a_link_costs_most_where_it_is_received() -> None:
    without = communicators(Grid(pipeline_size=2), (0, 0), straight(2)[:1], LIMITS)
    [one] = straight(2)[:1]
    assert without[one.receiver].estimated - without[one.sender].estimated == pytest.approx(
        LIMITS.nccl_max_ctas_p2p * (RECEIVER - SENDER)
    )


def test_memory_follows_the_blocks_and_the_neighbours() -> None:
    """Two replicas have one neighbour each, any larger number two; sums take two blocks."""
    sums = 2
    for d, neighbours in ((2, 1), (3, 2), (1000, 2)):
        for blocks in (8, 16):
            limits = BlockSettings(nccl_max_ctas_data=blocks)
            [own] = communicators(Grid(data_size=d), (0, 0), (), limits)
            assert own.number == 3 - 1
            channels = blocks + sums
            assert own.estimated == channels * neighbours * 12 * MIB
