"""The host's buffers for activations: a run takes as many bytes as a count says."""

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.parallel.lanes import InlineLane
from megatron.planning.host_room import activations_on_host
from megatron.runtime.host_rooms import Rooms, pinned
from megatron.runtime.offload import HostBuffers, HostCopies
from megatron.schedules.costs import Costs
from megatron.schedules.lower import Program, Start, lower
from megatron.schedules.make_plan import find_plan
from megatron.schedules.needs import HOST_KINDS
from megatron.schedules.passes import PassKind
from megatron.schedules.request import Request
from megatron.simulator.costs.count import PassCount, RankCount, Work

CPU = torch.device("cpu")
COSTS = Costs({"F": 1.0, "B": 1.0, "W": 1.0}, {"O": 0.25, "L": 0.25})


def moving(moved: dict[int, int]) -> RankCount:
    """Return a count whose chunks may move so many bytes."""
    passes: dict[tuple[PassKind, int], PassCount] = {
        ("F", chunk): PassCount.of(Work(moved=size)) for chunk, size in moved.items()
    }
    return RankCount(passes)


def program_of(slices: int) -> Program:
    request = Request("interleaved", "none", 2, 6, COSTS, slices=slices)
    return lower(replace(find_plan(request)[0], offloaded=2), COSTS)


@pytest.mark.parametrize("slices", [1, 3])
def test_a_run_takes_the_bytes_that_are_counted(slices: int) -> None:
    program = program_of(slices)
    of_slice = [moving({0: 3000 + 100 * s, 1: 5000 - 100 * s}) for s in range(slices)]
    count = replace(moving({0: 3000, 1: 5000}), slices=of_slice if slices > 1 else ())
    rooms = {(s, c): own.moved[c] for s, own in enumerate(of_slice) for c in (0, 1)}
    for rank in range(2):
        buffers = HostBuffers(CPU)
        HostCopies(program, rank, (), InlineLane(), buffers, CPU).reserve(rooms)
        assert activations_on_host(program, count, rank) == buffers.bytes > 0


def test_equal_activations_take_as_many_buffers_as_are_away_at_a_time() -> None:
    program = program_of(1)
    count = moving({0: 4096, 1: 4096})
    for rank, row in enumerate(program.rows):
        changes = [
            1 if step.comm.kind == "O" else -1
            for step in row
            if isinstance(step, Start) and step.comm.kind in HOST_KINDS
        ]
        assert activations_on_host(program, count, rank) == 4096 * max(accumulate(changes))


@given(st.lists(st.integers(1, 5000)))
def test_buffers_are_the_smallest_that_fit(sizes: list[int]) -> None:
    rooms = Rooms()
    taken = [rooms.take(size) for size in sizes]
    assert all(size <= room < 2 * size for size, room in zip(sizes, taken, strict=True))
    assert rooms.bytes == sum(taken)
    for room in taken:
        rooms.give(room)
    again = [rooms.take(size) for size in sorted(sizes)]
    assert again == sorted(taken)
    assert rooms.bytes == sum(taken)


def test_pinned_memory_is_a_power_of_two() -> None:
    sizes = [pinned(size) for size in range(1, 1025)]
    assert all(size <= own < 2 * size for size, own in enumerate(sizes, 1))
    assert {1, 1024} <= set(sizes) == {1 << k for k in range(11)}
    assert all(before <= after for before, after in pairwise(sizes))
    assert pinned(0) == 0
