"""Links are made in rounds, and the blocks of their communicators fit on a GPU or are ordered."""

import os
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.parallel.links import Link, in_rounds
from megatron.parallel.nccl import LAUNCH_ORDER, set_launch_order
from megatron.parallel.settings import MOST_BLOCKS, BlockSettings
from megatron.runtime.communicator import links_of
from megatron.schedules.lower import lane
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import Comm

SCHEDULES = ("1f1b", "interleaved", "hanayo", "zb-v")

links = st.sets(
    st.tuples(st.sampled_from("XG"), st.integers(0, 9), st.integers(0, 9))
    .filter(lambda link: link[1] != link[2])
    .map(lambda link: Link(*link))
)


def steps(ordered: tuple[Link, ...]) -> int:
    """How many links are made one after another, if every rank makes its own in this order."""
    free: dict[int, int] = {}
    for link in ordered:
        done = 1 + max(free.get(end, 0) for end in link.ends)
        free.update(dict.fromkeys(link.ends, done))
    return max(free.values(), default=0)


@given(links)
def test_all_links_are_made_and_nobody_waits_long(given_links: set[Link]) -> None:
    ordered = in_rounds(given_links)
    assert sorted(ordered) == sorted(given_links)
    assert in_rounds(sorted(given_links, reverse=True)) == ordered
    own = [sum(rank in link.ends for link in given_links) for rank in range(10)]
    assert steps(ordered) <= max(1, 2 * max(own) - 1) or not given_links  # greedy edge colouring


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_number_of_steps_does_not_grow_with_the_ranks(schedule: str) -> None:
    counts = [steps(links_of(make_plan(schedule, "none", p, p))) for p in (4, 8, 16)]
    assert max(counts) <= 12
    assert counts[1] == counts[2]


def test_in_order_of_ranks_it_would() -> None:
    chain = tuple(Link("X", *pair) for pair in pairwise(range(16)))
    assert (steps(chain), steps(in_rounds(chain))) == (15, 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_links_are_the_lanes_of_the_simulator(schedule: str) -> None:
    plan = make_plan(schedule, "vocab-2", 4, 4)
    comms = [Comm("X", 0, s) for s in range(len(plan.stages) - 1)]
    comms += [Comm("G", 0, s) for s in range(1, len(plan.stages))]
    lanes = {lane(plan, comm) for comm in comms}
    assert {lane for lane in lanes if lane[1] != lane[2]} == set(links_of(plan))


@pytest.mark.parametrize(
    ("tensor", "multiprocessors", "order"),
    [(1, 108, "0"), (1, 40, "1"), (2, 132, "0"), (2, 108, "1")],
    ids=["A100", "a small GPU", "H100, layers shared", "A100, layers shared"],
)
def test_nccl_orders_launches_where_not_all_blocks_fit(
    tensor: int, multiprocessors: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    v_shape = links_of(make_plan("zb-v", "vocab-2", 4, 4))
    blocks = BlockSettings().at_once(v_shape, 1, tensor - 1)
    assert blocks == 4 * 8 + 4 + 16 + (MOST_BLOCKS if tensor > 1 else 0)
    monkeypatch.setenv(LAUNCH_ORDER, "")
    monkeypatch.delenv(LAUNCH_ORDER)
    set_launch_order(blocks, multiprocessors)
    assert os.environ[LAUNCH_ORDER] == order
    set_launch_order(0, 1)
    assert os.environ[LAUNCH_ORDER] == order  # what is set stays
