"""collective_time.py and cluster.py: rings, trees, machines, and passes beside communications."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.schedules.pair_time import beside
from megatron.simulator.costs.cluster import Cluster, SpreadAxis
from megatron.simulator.costs.collective_time import LAUNCH, Links, Path
from megatron.simulator.costs.count import (
    AWAIT,
    NO_WORK,
    Begin,
    Collective,
    CollectiveKind,
    Launch,
    Work,
)
from megatron.simulator.costs.gpus import GPUS

LINKS = Links(Path(200e9, 2e-6), Path(20e9, 10e-6))
FREE = Links(Path(200e9, 0.0), Path(20e9, 0.0))
KINDS: list[CollectiveKind] = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
]
GPU = GPUS["A100"]


@given(st.sampled_from(KINDS), st.integers(2, 512), st.integers(0, 10**9), st.integers(0, 10**9))
def test_more_bytes_take_longer(kind: CollectiveKind, ranks: int, size: int, more: int) -> None:
    for together in (1, 2, 8, ranks):
        times = [LINKS.collective(kind, ranks, each, together) for each in (size, size + more)]
        assert LAUNCH < times[0] <= times[1]


@pytest.mark.parametrize(("ranks", "together", "near", "far"), [(8, 8, 7, 0), (8, 2, 1, 6)])
def test_an_exchange_sends_each_part_straight_to_its_rank(
    ranks: int, together: int, near: int, far: int
) -> None:
    size = ranks * 1e9
    found = FREE.collective("all_to_all", ranks, size, together)
    slower = max(near * 1e9 / FREE.link.bandwidth, far * 1e9 / FREE.network.bandwidth)
    assert found == pytest.approx(LAUNCH + slower)
    assert FREE.collective("all_to_all", ranks, size, together, most=1e9) == pytest.approx(
        LAUNCH + max(near, far)
    )


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_rings_move_the_least_that_must_move(ranks: int) -> None:
    size = 10**9
    part = (ranks - 1) / ranks * size / 200e9
    gathered = FREE.collective("all_gather", ranks, size, ranks)
    assert gathered == pytest.approx(LAUNCH + part)
    assert FREE.collective("reduce_scatter", ranks, size, ranks) == gathered
    assert FREE.collective("all_reduce", ranks, size, ranks) == pytest.approx(LAUNCH + 2 * part)
    assert FREE.collective("broadcast", ranks, size, ranks) == pytest.approx(LAUNCH + size / 200e9)


def test_one_rank_has_nothing_to_wait_for() -> None:
    assert LINKS.collective("all_reduce", 1, 10**9, 8) == 0


def test_every_rank_in_a_machine_brings_an_adapter() -> None:
    assert [LINKS.bandwidth(4, together) for together in (1, 2, 8)] == [20e9, 40e9, 160e9]
    assert LINKS.bandwidth(4, 16) == LINKS.bandwidth(1, 4) == 200e9


def test_small_all_reduces_of_many_machines_go_along_a_tree() -> None:
    many = LINKS.collective("all_reduce", 512, 4, 8)
    assert many < LAUNCH + 2 * (512 - 1) * 2e-6
    assert many == pytest.approx(LAUNCH + 2 * (7 * 2e-6 + 6 * 10e-6), rel=1e-3)


def test_messages_take_the_path_that_they_go() -> None:
    inside, outside = (LINKS.message(10**6, crossing=crossing) for crossing in (False, True))
    assert inside == pytest.approx(LAUNCH + 2e-6 + 1e6 / 200e9)
    assert outside == pytest.approx(LAUNCH + 10e-6 + 1e6 / 20e9)


@pytest.mark.parametrize(("bandwidth", "latency"), [(0.0, 0.0), (1.0, -1.0)])
def test_paths_without_a_rate_or_with_a_negative_latency_are_refused(
    bandwidth: float, latency: float
) -> None:
    with pytest.raises(ValueError, match="give"):
        Path(bandwidth, latency)


CLUSTER = Cluster(GPU.rates, GPU.links(), {"tensor": 8, "column": 1})
GATHER = Collective("all_gather", "tensor", 8, 100 * 2**20)
KERNEL = Launch("norm", 2**30)


def test_a_pass_without_steps_takes_no_time() -> None:
    assert CLUSTER.seconds(NO_WORK) == 0


def test_a_collective_that_stands_alone_is_waited_for() -> None:
    alone = CLUSTER.collective(GATHER) + CLUSTER.rates.seconds(KERNEL)
    assert CLUSTER.seconds(Work((GATHER, KERNEL))) == pytest.approx(alone)


def test_a_collective_beside_a_kernel_slows_the_kernel_by_the_bytes_it_moves() -> None:
    work = Work((Begin((GATHER,)), KERNEL, AWAIT))
    kernel = CLUSTER.rates.seconds(KERNEL)
    lane = CLUSTER.collective(GATHER)
    assert lane < kernel < CLUSTER.seconds(work) < kernel + lane
    without = Cluster(CLUSTER.rates, CLUSTER.links, CLUSTER.together, channel=1e20)
    assert without.seconds(work) == pytest.approx(kernel)


def test_an_await_waits_for_all_that_was_begun() -> None:
    work = Work((Begin((GATHER, GATHER)), AWAIT, KERNEL))
    alone = 2 * CLUSTER.collective(GATHER) + CLUSTER.rates.seconds(KERNEL)
    assert CLUSTER.seconds(work) == pytest.approx(alone)


def test_an_axis_that_leaves_machines_is_slower() -> None:
    column = GATHER._replace(axis="column")
    assert CLUSTER.collective(column) > 5 * CLUSTER.collective(GATHER)
    assert CLUSTER.exchange("data", "all_gather", 8, GATHER.bytes) == CLUSTER.collective(GATHER)


def test_a_limit_of_blocks_slows_what_the_links_could_do_faster_and_nothing_else() -> None:
    free = Cluster(GPU.rates, FREE, {"column": 8, "data": 1})
    limited = Cluster(GPU.rates, FREE, free.together, blocks={"column": 2, "data": 2})
    size = 4 * 10**9
    assert limited.exchange("column", "broadcast", 8, size) == pytest.approx(
        LAUNCH + size / (2 * limited.channel)
    )
    axes: tuple[SpreadAxis, ...] = ("data", "tensor")
    for axis in axes:
        alike = [own.exchange(axis, "all_gather", 8, size) for own in (free, limited)]
        assert alike[0] == alike[1]


def test_links_that_a_user_gives_replace_the_usual_ones() -> None:
    given_links = GPU.links((1e9, None), (None, 1e-3))
    assert (given_links.link.bandwidth, given_links.network.latency) == (1e9, 1e-3)
    assert given_links.link.latency == GPU.links().link.latency
    assert given_links.network.bandwidth == GPU.links().network.bandwidth


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 20), st.floats(0, 1))
def test_work_beside_a_communication_is_slowed_while_it_lasts(
    clock: float, seconds: float, until: float, crowding: float
) -> None:
    end = beside(clock, seconds, until, crowding)
    slowed = min(seconds * (1 + crowding), max(0.0, until - clock))
    assert clock + seconds - 1e-9 <= end <= clock + seconds + crowding * slowed + 1e-9
