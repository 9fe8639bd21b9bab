"""The grid against an enumeration that knows only the meaning of the orders."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.parallel.grid import AxisName, Coordinates, Grid

AXES: tuple[AxisName, ...] = ("tensor", "context", "data", "pipeline", "vocabulary", "world")
OF_EXPERTS: tuple[AxisName, ...] = ("expert_tensor", "experts", "expert_data")
SIZES = st.integers(1, 5)
FEW = st.integers(1, 3)
GRIDS = st.builds(Grid, FEW, SIZES, SIZES, st.sampled_from(["tp-dp-pp", "tp-pp-dp"]), FEW)


def enumerated(grid: Grid) -> list[tuple[int, int, int, int]]:
    """The (tp, dp, pp, cp) of every rank: nested loops, the slowest direction outermost."""
    t, d, p = map(range, (grid.tensor_size, grid.data_size, grid.pipeline_size))
    c = range(grid.context_size)
    if grid.order == "tp-dp-pp":
        return [(tp, dp, pp, cp) for pp in p for dp in d for cp in c for tp in t]
    return [(tp, dp, pp, cp) for dp in d for pp in p for cp in c for tp in t]


def group_of(grid: Grid, name: str, rank: int) -> list[int]:
    """The ranks that share with ``rank`` what an axis keeps, in the order of their place."""
    places = enumerated(grid)
    tp, dp, pp, cp = places[rank]
    contexts = range(grid.context_size)
    wanted = {
        "tensor": [(k, dp, pp, cp) for k in range(grid.tensor_size)],
        "context": [(tp, dp, pp, k) for k in contexts],
        "data": [(tp, replica, pp, k) for replica in range(grid.data_size) for k in contexts],
        "pipeline": [(tp, dp, k, cp) for k in range(grid.pipeline_size)],
        "vocabulary": [
            (k, dp, stage, cp)
            for stage in range(grid.pipeline_size)
            for k in range(grid.tensor_size)
        ],
        "world": places,
    }[name]
    return [places.index(place) for place in wanted]


@given(GRIDS)
def test_coordinates_are_those_of_nested_loops(grid: Grid) -> None:
    places = enumerated(grid)
    assert grid.world_size == len(places)
    for rank, place in enumerate(places):
        assert grid.coordinates(rank) == Coordinates(*place)


@st.composite
def spread_grids(draw: st.DrawFn) -> Grid:
    """Grids with experts spread over ranks."""
    grid = draw(GRIDS)
    sizes = [n for n in range(1, grid.stage_size + 1) if grid.stage_size % n == 0]
    block = draw(st.sampled_from(sizes))
    tensor = draw(st.sampled_from([n for n in range(1, block + 1) if block % n == 0]))
    return replace(grid, expert_size=block // tensor, given_expert_tensor_size=tensor)


@given(spread_grids())
def test_experts_fold_over_the_ranks_of_a_stage(grid: Grid) -> None:
    """The reference: a stage's ranks in Megatron's order (tp, cp, dp), cut into nested pieces."""
    places = enumerated(grid)
    wanted: dict[str, set[tuple[int, ...]]] = {name: set() for name in OF_EXPERTS}
    for pp in range(grid.pipeline_size):
        stage = [
            places.index((tp, dp, pp, cp))
            for dp in range(grid.data_size)
            for cp in range(grid.context_size)
            for tp in range(grid.tensor_size)
        ]
        etp, block = grid.expert_tensor_size, grid.expert_block
        blocks = [stage[at : at + block] for at in range(0, len(stage), block)]
        for own in blocks:
            wanted["expert_tensor"] |= {tuple(own[at : at + etp]) for at in range(0, block, etp)}
            wanted["experts"] |= {tuple(own[at::etp]) for at in range(etp)}
        wanted["expert_data"] |= set(zip(*blocks, strict=True))
    for name in OF_EXPERTS:
        assert set(grid.groups(name)) == wanted[name]


@given(GRIDS)
def test_experts_with_their_layer_have_the_axes_of_the_layer(grid: Grid) -> None:
    assert not grid.spreads_experts
    assert grid.groups("expert_tensor") == grid.groups("tensor")
    assert set(grid.groups("expert_data")) == set(grid.groups("data"))


@pytest.mark.parametrize(("experts", "tensor"), [(3, 1), (2, 4), (0, 1), (1, 0)])
def test_experts_that_do_not_fold_are_refused(experts: int, tensor: int) -> None:
    with pytest.raises(ValueError, match="do not divide into groups"):
        Grid(2, 2, 1, expert_size=experts, given_expert_tensor_size=tensor)


@pytest.mark.parametrize("name", [*AXES, *OF_EXPERTS])
@given(grid=GRIDS | spread_grids())
def test_groups_of_an_axis_tile_the_job(name: AxisName, grid: Grid) -> None:
    groups = grid.groups(name)
    assert sorted(itertools.chain(*groups)) == list(range(grid.world_size))
    assert len({len(ranks) for ranks in groups}) == 1
    assert all(list(ranks) == sorted(ranks) for ranks in groups)


@pytest.mark.parametrize("name", AXES)
@given(grid=GRIDS, data=st.data())
def test_an_axis_is_what_the_enumeration_finds(
    name: AxisName, grid: Grid, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, grid.world_size - 1))
    axis = grid.axis(name, rank)
    assert axis.name == name
    assert list(axis.ranks) == group_of(grid, name, rank)
    assert axis.ranks[axis.rank] == rank
    assert axis.size == len(axis.ranks)
    assert axis.ranks in grid.groups(name)


@given(GRIDS)
def test_places_on_the_vocabulary_axis_are_indices_of_shards(grid: Grid) -> None:
    for rank, (tp, _, pp, _) in enumerate(enumerated(grid)):
        k = pp * grid.tensor_size + tp
        assert grid.axis("vocabulary", rank).rank == grid.vocabulary_rank(pp, tp) == k


def test_the_default_order_by_hand() -> None:
    grid = Grid(tensor_size=2, data_size=2, pipeline_size=2)
    assert grid.groups("tensor") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert grid.groups("data") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert grid.groups("pipeline") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert grid.groups("vocabulary") == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_the_other_order_by_hand() -> None:
    grid = Grid(2, 2, 2, order="tp-pp-dp")
    assert grid.groups("data") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert grid.groups("pipeline") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert grid.groups("vocabulary") == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_ranks_that_share_a_sequence_are_next_to_each_other() -> None:
    grid = Grid(1, 2, 2, context_size=2)
    assert grid.groups("context") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert grid.groups("data") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert grid.groups("vocabulary") == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, -1, 1), (1, 1, 0)])
def test_a_grid_without_ranks_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Grid(*sizes)


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match="'pp-tp-dp': must be tp-dp-pp or tp-pp-dp"):
        Grid(order="pp-tp-dp")  # type: ignore[arg-type]  # the mistake that is tried
