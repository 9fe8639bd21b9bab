"""Which ranks are in one machine follows from their numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.parallel.grid import ORDERS, Grid, Order
from megatron.parallel.placement import Placement, fewest_hops

sizes = st.integers(1, 4)


@given(sizes, sizes, sizes, st.sampled_from(("tp-dp-pp", "tp-pp-dp")), st.integers(1, 9))
def test_messages_cross_where_the_two_ranks_are_in_different_machines(
    t: int, d: int, p: int, order: Order, ranks: int
) -> None:
    grid = Grid(t, d, p, order)
    found = Placement(grid, ranks)
    where = {
        (at.pipeline, at.data, at.tensor): rank // ranks
        for rank in range(grid.world_size)
        for at in [grid.coordinates(rank)]
    }
    assert found.machines == len(set(where.values()))
    for a in range(p):
        for b in range(a + 1, p):
            apart = any(where[a, k, i] != where[b, k, i] for k in range(d) for i in range(t))
            assert ((a, b) in found.crossing) == apart
    assert found.tensor == any(
        where[a, k, 0] != where[a, k, i] for a in range(p) for k in range(d) for i in range(t)
    )
    assert found.data == any(
        where[a, 0, i] != where[a, k, i] for a in range(p) for k in range(d) for i in range(t)
    )


@pytest.mark.parametrize(
    ("grid", "hops", "data"),
    [
        (Grid(1, 1, 8), 0, False),
        (Grid(1, 1, 16), 1, False),
        (Grid(2, 1, 8), 1, False),
        (Grid(1, 2, 8), 1, False),
        (Grid(2, 2, 4), 1, False),
        (Grid(2, 4, 2), 1, False),
        (Grid(1, 2, 8, "tp-pp-dp"), 0, True),
        (Grid(1, 8, 4), 3, False),
        (Grid(1, 8, 4, "tp-pp-dp"), 0, True),
    ],
    ids=str,
)
def test_the_hops_of_a_pipeline_that_leave_a_machine_of_eight(
    grid: Grid, hops: int, data: bool
) -> None:
    assert (Placement(grid, 8).hops, Placement(grid, 8).data) == (hops, data)


@given(sizes, sizes, sizes, st.integers(1, 9))
def test_ranks_that_share_a_sequence_come_after_those_of_a_layer(
    t: int, c: int, p: int, ranks: int
) -> None:
    found = Placement(Grid(t, 1, p, context_size=c), ranks)
    machines = [{rank // ranks for rank in group} for group in found.grid.groups("context")]
    assert found.context == any(len(own) > 1 for own in machines)
    if ranks % (t * c) == 0:
        assert not found.context


@given(sizes, sizes, sizes, st.integers(1, 9))
def test_no_other_order_leaves_machines_less_often(t: int, d: int, p: int, ranks: int) -> None:
    chosen = fewest_hops(Grid(t, d, p), ranks)
    hops = {order: Placement(Grid(t, d, p, order), ranks).hops for order in ORDERS}
    assert hops[chosen] == min(hops.values())
    assert chosen == "tp-dp-pp" or hops[chosen] < hops["tp-dp-pp"]


@pytest.mark.parametrize(
    ("grid", "tensor", "data", "pipeline"),
    [
        (Grid(8, 32, 2), 8, 1, 1),
        (Grid(2, 32, 1), 2, 4, 1),
        (Grid(1, 48, 1), 1, 8, 1),
        (Grid(1, 1, 8), 1, 1, 8),
        (Grid(1, 1, 12), 1, 1, 4),
        (Grid(16, 1, 2), 8, 1, 1),
        (Grid(2, 2, 8), 2, 2, 2),
    ],
)
def test_ranks_of_a_group_that_share_a_machine(
    grid: Grid, tensor: int, data: int, pipeline: int
) -> None:
    found = Placement(grid, 8)
    assert found.together("tensor") == tensor
    assert found.together("data") == data
    assert found.together("pipeline") == pipeline
