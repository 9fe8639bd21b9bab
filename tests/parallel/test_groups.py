"""Groups are slices of the grid: who is in them, and who shares one."""

from datetime import timedelta
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness.rank_pool import RankPool

from megatron.parallel import collectives, p2p
from megatron.parallel.grid import AxisName, Grid, Tiling
from megatron.parallel.groups import Groups, connect_grid, make_groups, single_rank
from megatron.parallel.links import Link, in_rounds
from megatron.parallel.settings import BlockSettings

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
AXES: tuple[AxisName, ...] = ("world", "tensor", "context", "data", "pipeline")
OF_TENSOR = ("tensor_sums", "partial_gradients", "row")
OF_PIPELINE = ("transfers", "pipeline_hosts", "column")
OTHERS = (*OF_TENSOR, *OF_PIPELINE, "gradients", "ends", "world_hosts")
GRIDS = [
    Grid(2, 2, 1),
    Grid(2, 1, 2),
    Grid(4, 1, 1),
    Grid(1, 2, 2),
    Grid(1, 2, 2, "tp-pp-dp"),
    Grid(1, 1, 4),
    Grid(1, 2, 1, context_size=2),
    Grid(1, 1, 2, context_size=2),
]


def talk(rank: int, world_size: int, *, grid: Grid) -> dict[str, list[int]]:
    """What is heard on every axis, if every rank tells its own number."""
    groups = make_groups(grid, CPU, timedelta(seconds=60))
    heard = {}
    for name in (*AXES, *OTHERS):
        axis = getattr(groups, name)
        assert axis.ranks[axis.rank] == rank
        assert axis.group is None or dist.get_process_group_ranks(axis.group) == list(axis.ranks)
        gathered = collectives.all_gather(torch.tensor(rank), axis).tolist()
        assert gathered == list(axis.ranks)
        assert axis.all_gather_object(rank) == gathered
        total = torch.tensor(rank)
        axis.all_reduce(total)
        assert total == sum(gathered)
        axis.barrier()
        heard[name] = gathered
    return heard


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_whoever_is_on_an_axis_is_heard_there(grid: Grid, ranks: RankPool) -> None:
    by_rank = ranks.run(talk, grid.world_size, grid=grid)
    for rank, heard in enumerate(by_rank):
        for name in AXES:
            assert heard[name] == list(grid.axis(name, rank).ranks)
        for other in OF_PIPELINE:
            assert heard[other] == heard["pipeline"]
        for other in OF_TENSOR:
            assert heard[other] == heard["tensor"]
        pipeline = heard["pipeline"]
        both = sorted({pipeline[0], pipeline[-1]})
        assert heard["ends"] == (both if rank in both else [rank])


def connect(
    grid: Grid, rank: int, device: torch.device, ends: tuple[int, int]
) -> tuple[Groups, list[str]]:
    """Connect with groups that are made of air; return what was asked for."""
    asked = []

    def make(use: str, tiling: Tiling) -> dist.ProcessGroup:
        asked.append(f"{use} {tiling}")
        return dist.ProcessGroup(dist.HashStore(), 0, 1)

    return connect_grid(grid, rank, device, ends, make), asked


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("ends", [(0, 0), (0, -1)], ids=str)
def test_all_ranks_make_the_same_groups_in_one_order(grid: Grid, ends: tuple[int, int]) -> None:
    pair = (ends[0], ends[1] % grid.pipeline_size)
    asked = [connect(grid, rank, CUDA, pair)[1] for rank in range(grid.world_size)]
    assert all(own == asked[0] for own in asked)
    assert len(set(asked[0])) == len(asked[0])


def test_axes_of_the_same_ranks_share_a_group_for_the_same_use() -> None:
    own, asked = connect(Grid(pipeline_size=4), 0, CPU, (0, 3))
    assert own.world.group is own.pipeline.group
    assert own.world_hosts.group is own.pipeline_hosts.group
    assert [name.split()[0] for name in asked] == [
        "control",
        "vocabulary",
        "transfers",
        "state",
        "ends",
    ]
    _, fewer = connect(Grid(pipeline_size=4), 0, CPU, (0, 0))
    assert len(fewer) == len(asked) - 1


@pytest.mark.parametrize("grid", [Grid(2, 1, 2), Grid(2, 2, 2)], ids=str)
def test_passes_and_lanes_share_no_group(grid: Grid) -> None:
    """Each use of the tensor-parallel ranks has a group of its own, as they run at once."""
    own, _ = connect(grid, 0, CUDA, (0, grid.pipeline_size - 1))
    of_tensor = [own.tensor, own.tensor_sums, own.partial_gradients, own.row]
    assert len({id(axis.group) for axis in of_tensor}) == 4
    of_pipeline = [own.pipeline, own.transfers, own.column, own.ends]
    assert len({id(axis.group) for axis in of_pipeline}) == 4
    assert own.column.ranks == own.pipeline.ranks == own.ends.ranks
    assert own.row.ranks == own.tensor.ranks
    k = [own.grid.coordinates(rank) for rank in own.vocabulary.ranks]
    assert [(at.pipeline, at.tensor) for at in k] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_gradients_and_attention_of_the_same_ranks_share_no_group() -> None:
    """One is reduced in a lane, while a pass waits for the other."""
    own, _ = connect(Grid(1, 1, 2, context_size=2), 0, CUDA, (0, 1))
    assert own.context.ranks == own.data.ranks == own.gradients.ranks
    assert len({id(axis.group) for axis in (own.context, own.data, own.gradients)}) == 3
    assert own.replica == (0, 1)


def test_only_the_ends_of_the_pipeline_share_a_group() -> None:
    grid = Grid(pipeline_size=4)
    sizes = [connect(grid, rank, CPU, (0, 3))[0].ends.size for rank in range(4)]
    assert sizes == [2, 1, 1, 2]
    assert [connect(grid, rank, CPU, (0, 0))[0].ends.size for rank in range(4)] == [1] * 4


def test_a_single_rank_needs_no_process_group() -> None:
    groups = single_rank(CPU)
    value = torch.tensor([3.0])
    assert (groups.vocabulary.rank, groups.vocabulary.size) == (0, 1)
    for name in (*AXES, *OTHERS):
        axis = getattr(groups, name)
        assert (axis.rank, axis.size, axis.group) == (0, 1, None)
        axis.all_reduce(value)
        axis.barrier()
        assert axis.all_gather_object("x") == ["x"]
        assert torch.equal(collectives.all_gather(value, axis), torch.tensor([[3.0]]))
    assert value.item() == 3


def both_ways(ranks: int) -> tuple[Link, ...]:
    """The links of 1F1B."""
    pairs = list(pairwise(range(ranks)))
    return in_rounds([Link("X", *pair) for pair in pairs] + [Link("G", b, a) for a, b in pairs])


def talk_over_links(rank: int, world_size: int, *, grid: Grid) -> list[str]:
    """What arrives over every link, in an order in which one shared group would get stuck.

    A rank first waits for what the link itself brings, while messages of others lie unanswered.
    """
    groups = make_groups(grid, CPU, timedelta(seconds=60), links=both_ways(grid.pipeline_size))
    assert not groups.transfers.group
    own = sorted(groups.links)
    assert len({id(axis.group) for axis in groups.links.values()}) == len(own)
    going, coming = [], {}
    for link in own:
        axis, other = groups.way(link)
        if link.sender == groups.pipeline.rank:
            number = torch.tensor([100 * link.sender + link.receiver + len(link.kind)])
            going.append(p2p.send(number, other, axis))
        else:
            coming[link] = p2p.receive(torch.zeros(1, dtype=torch.int64), other, axis)
    arrived = [f"{link}: {coming[link].wait().item()}" for link in reversed(coming)]
    for transfer in going:
        transfer.wait()
    return arrived


@pytest.mark.parametrize("grid", [Grid(1, 1, 4), Grid(1, 2, 2), Grid(2, 1, 2)], ids=str)
def test_every_link_is_a_group_of_its_own(grid: Grid, ranks: RankPool) -> None:
    by_rank = ranks.run(talk_over_links, grid.world_size, grid=grid)
    for rank, arrived in enumerate(by_rank):
        place = grid.coordinates(rank).pipeline
        to_here = [link for link in sorted(both_ways(grid.pipeline_size)) if link.receiver == place]
        assert arrived == [f"{k}: {100 * k.sender + place + 1}" for k in reversed(to_here)]


def test_without_links_all_messages_share_a_group() -> None:
    own, _ = connect(Grid(pipeline_size=4), 1, CPU, (0, 0))
    assert own.way(Link("X", 1, 2)) == (own.transfers, 2)
    assert own.way(Link("G", 1, 0)) == (own.transfers, 0)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """What PyTorch is asked for, where NCCL would be."""
    asked: list[SimpleNamespace] = []

    def new_group(ranks: list[int], *_: object, **given: object) -> object:
        asked.append(SimpleNamespace(ranks=ranks, **given))
        return dist.ProcessGroup(dist.HashStore(), 0, len(ranks))

    options = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    return asked


def test_communicators_have_few_blocks_and_are_made_at_once(nccl: list[SimpleNamespace]) -> None:
    limits, links = BlockSettings(3, 5, 7), both_ways(2)
    make_groups(Grid(2, 2, 2), CUDA, timedelta(seconds=60), (0, 1), links, limits)
    blocks, clusters = dict[str, set[int | None]](), dict[str, set[int | None]]()
    hurried = dict[str, set[bool]]()
    for asked in nccl:
        use = asked.group_desc.partition(" ")[0]
        on_hosts = use == "state"
        assert getattr(asked, "device_id", None) == (None if on_hosts else CUDA)
        options = getattr(asked, "pg_options", None)
        assert options is None or options._timeout == timedelta(seconds=60)
        config = vars(options.config) if options else {}
        blocks.setdefault(use, set()).add(config.get("max_ctas"))
        clusters.setdefault(use, set()).add(config.get("cga_cluster_size"))
        if options:
            hurried.setdefault(use, set()).add(options.is_high_priority_stream)
    assert blocks == {
        "transfers": {3},
        "vocabulary": {5},
        "gradients": {7},
        "ends": {7},
        "tensor": {None},
        "control": {2},
        "state": {None},
    }
    assert clusters == {use: {most and 1 for most in own} for use, own in blocks.items()}
    assert hurried == {
        "transfers": {True},
        "vocabulary": {True},
        "tensor": {True},
        "gradients": {False},
        "ends": {False},
        "control": {False},
    }
