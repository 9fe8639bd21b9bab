"""Stand-ins for peers: planned times, what they move, and the real executor beside them."""

from contextlib import nullcontext
from itertools import chain
from math import isfinite
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.parallel import collectives, p2p
from megatron.parallel.grid import Grid
from megatron.parallel.groups import Groups
from megatron.parallel.links import Link
from megatron.runtime import timeline
from megatron.schedules.costs import Costs
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import find_plan
from megatron.schedules.needs import STAGE_KINDS, Comm, participants
from megatron.schedules.pair_steps import PairSteps, Sends, Waits, Works
from megatron.schedules.request import Request
from megatron.simulator.clocks import Clocks
from megatron.simulator.costs.gpus import gpu
from megatron.simulator.simulate import Span
from tools.emulation import pace
from tools.fake_clock import CLUSTER, FakeTime
from tools.gpu_sections import overlap, peers, stand_ins
from tools.gpu_sections.lone_rank import LoneRank, Ran, measured_costs, ready_times
from tools.gpu_sections.peers import Blocks, Peers
from tools.gpu_sections.stand_ins import stand_in_groups
from tools.gpu_sections.timing import Scale

CPU = torch.device("cpu")
LINK = Link("X", 0, 1)
MESSAGES = [Comm("X", 0), Comm("X", 1)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    clock = FakeTime()
    for module in (pace, peers, stand_ins, timeline):
        monkeypatch.setattr(module, "time", clock)
    return clock


def second_stage(ready: dict[Comm, float]) -> tuple[Peers, Groups]:
    """The first rank of the second of two stages, each of two tensor-parallel ranks."""
    others = Peers(CPU, CLUSTER, messages={LINK: MESSAGES}, ready=ready)
    grid = Grid(tensor_size=2, pipeline_size=2)
    return others, stand_in_groups(grid, 2, (0,), [LINK], others)


@pytest.mark.parametrize(
    ("ready", "first", "second"), [((3.0, 3.0), 3.0, 3.0), ((3.0, 9.0), 3.0, 9.0)]
)
def test_a_message_comes_after_its_peer_and_after_the_message_before(
    ready: tuple[float, float], first: float, second: float, clock: FakeTime
) -> None:
    others, groups = second_stage(dict(zip(MESSAGES, ready, strict=True)))
    axis, other = groups.way(LINK)
    buffers = [torch.full((64,), float("nan")) for _ in range(2)]
    takes = CLUSTER.message(256, crossing=False)
    others.begin()
    begin = clock.now
    under_way = [p2p.receive(buffer, other, axis) for buffer in buffers]
    assert under_way[0].wait().isfinite().all()
    assert clock.now - begin == pytest.approx(first + takes, rel=1e-6)
    under_way[1].wait()
    assert clock.now - begin == pytest.approx(max(second, first + takes) + takes, rel=1e-6)


def test_messages_begin_anew_with_each_iteration(clock: FakeTime) -> None:
    others, groups = second_stage({MESSAGES[0]: 4.0})
    axis, other = groups.way(LINK)
    for _ in range(2):
        others.begin()
        begin = clock.now
        p2p.receive(torch.zeros(4), other, axis).wait()
        assert clock.now - begin == pytest.approx(4.0, abs=1e-3)


def test_a_collective_waits_for_its_last_rank_and_lasts_as_priced(clock: FakeTime) -> None:
    comm = Comm("C0", 0)
    others, groups = second_stage({comm: 5.0})
    tensor = torch.zeros(1 << 20)
    takes = CLUSTER.exchange("column", "broadcast", 2, tensor.nbytes)
    others.begin()
    begin = clock.now
    with others.during(comm):
        collectives.broadcast(tensor, 0, groups.column)
    assert clock.now - begin == pytest.approx(5.0 + takes, rel=1e-9)
    assert tensor.std() > 0  # random numbers of the other rank
    before = clock.now
    others.are_there = False
    with others.during(comm):
        collectives.broadcast(tensor, 0, groups.column)
    assert clock.now - before < 1e-6


def test_gathered_parts_are_copies_and_sums_are_the_own_summands() -> None:
    """On a GPU; on CPUs collectives are messages."""
    _, groups = second_stage({})
    group = groups.tensor.group
    assert isinstance(group, stand_ins.StandInGroup)
    options = SimpleNamespace(asyncOp=True)
    part, whole = torch.arange(6.0), torch.empty(2, 6)
    group.all_gather_single(whole, part, options).wait()
    assert torch.equal(whole, part.expand(2, 6))
    group.reduce_scatter_single(whole[0], whole, options).wait()
    assert torch.equal(whole, part.expand(2, 6))


def test_ranks_say_what_this_one_says() -> None:
    _, groups = second_stage({})
    assert groups.world.all_gather_object("a") == ["a"] * 4
    groups.world.barrier()


@pytest.mark.parametrize(
    ("use", "expected"),
    [("transfers X 0 to 1", 2), ("vocabulary", 3), ("tensor", 5), ("control", 1)],
)
def test_a_use_of_groups_has_its_blocks(use: str, expected: int) -> None:
    assert Blocks(2, 3, 5).of(use) == expected


def test_peers_are_ready_when_the_last_of_them_has_issued() -> None:
    """F takes 1, B takes 2: the second rank begins F at 1, and ends B at 4."""
    costs = Costs({"F": 1.0, "B": 2.0})
    plan = find_plan(Request("1f1b", "none", 2, 1, costs=costs)).plan
    clocks = Clocks(lower(plan, costs), costs)
    assert ready_times(clocks, 0)[Comm("G", 0, 1)] == 4.0
    assert ready_times(clocks, 1)[Comm("X", 0, 0)] == 1.0


def test_costs_have_the_measured_work_and_the_planned_waits() -> None:
    steps = PairSteps((Works(2.0), Sends(1.0, "tensor"), Waits(0)))
    costs = Costs({"F": [[3.0, 5.0]], "W": 1.0}, waits={"F": 1.0}, turns={"F": [[lambda: steps]]})
    found = measured_costs(costs, {"F": 6.0, "W": 3.0, "S": 1.0}, 0)
    # In the mean F worked for 3; it was measured as 6.
    assert found.passes == {"F": [[5.0, 9.0]], "W": 3.0}
    finder = found.turns["F"][0][0]
    assert finder().steps == (Works(4.0), Sends(1.0, "tensor"), Waits(0))
    assert finder() is finder()


def span(lane: str, label: str, start: float, end: float, beside: str = "") -> Span:
    return Span(0, lane, label, label[0], 0, 0, start, end, beside)


def test_an_iteration_is_told_by_its_records() -> None:
    ran = Ran.of(
        [
            span("compute", "F0", 0.0, 2.0),
            span("compute", "F1", 2.0, 6.0),
            span("wait", "G0", 6.0, 7.0),
            span("compute", "F2", 7.0, 9.0, "B0"),
            span("compute", "B0", 9.0, 11.0, "F2"),
            span("comm", "C0 1", 0.0, 50.0),
        ]
    )
    assert ran == Ran(11.0, {"F": 3.0}, {("F", "B"): [4.0]}, 10.0, 1.0)


@pytest.fixture(scope="module")
def lone() -> Any:
    rank = LoneRank(overlap.SMALL, 4, 2, CPU, gpu("H200"))
    yield rank
    rank.close()


@pytest.mark.parametrize("slower", [1.0, 1e3])
def test_the_executor_waits_as_planned(lone: LoneRank, slower: float, clock: FakeTime) -> None:
    """The peers' passes take so many times as long; this rank's take none on this clock."""
    passes = dict.fromkeys(lone.forecast.alone.passes, slower)
    clocks = lone.simulated(Costs(passes, lone.forecast.alone.comms)).clocks
    ready, plan = ready_times(clocks, lone.place), lone.program.plan
    ends = {own.label: own.end for own in lone.record(clocks) if own.lane == "wait"}
    received = [
        comm
        for comm in ready
        if comm.kind in STAGE_KINDS and participants(plan, comm)[1] == lone.place
    ]
    assert len(received) == 12
    for comm in received:
        assert ends[str(comm)] >= ready[comm]
    collective = [comm for comm in ready if comm.kind in ("C0", "C1", "CIF", "CIB")]
    assert all(ends.get(str(comm), ready[comm]) >= ready[comm] for comm in collective)
    assert lone.run(None).seconds < 1e-3


def test_the_work_of_a_rank_is_that_of_all_its_passes(lone: LoneRank) -> None:
    """Four microbatches, two chunks; passes in pairs count too."""
    simulated = lone.simulated(lone.forecast.alone)
    assert simulated.work({"F": 1.0, "B": 10.0, "S": 100.0}) == 8 + 80 + 400


def test_the_executor_runs_pairs_and_passes_apart(lone: LoneRank) -> None:
    ran = lone.run(lone.simulated(lone.forecast.alone).clocks)
    assert ran.pairs
    assert ran.pairs.keys() == lone.simulated(lone.forecast.alone).pairs().keys()
    assert {"F", "B", "W", "S", "T"} <= ran.passes.keys() | {*chain(*ran.pairs)}


def test_the_section_has_all_its_rows() -> None:
    found = overlap.measure(Scale(CPU, small=True))
    names = [own.name for own in overlap.SETTINGS]
    iterations, passes, pairs = (found.values[key] for key in ("iterations", "passes", "pairs"))
    expected = [(name, way) for name in names for way in ("apart", "in pairs")]
    assert [(row["setting"], row["passes"]) for row in iterations] == expected
    assert {row["pass"] for row in passes} == {"F", "B", "W", "S", "T"}
    assert {row["setting"] for row in pairs} == set(names)
    for row in (*iterations, *passes, *pairs):
        numbers = [value for value in row.values() if isinstance(value, float)]
        assert numbers
        assert all(map(isfinite, numbers))


def test_a_setting_that_fails_says_why_and_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def within(scale: Scale, rank: LoneRank, own: overlap.Setting) -> Any:
        if own.leaves:
            raise RuntimeError("no product leaves room\nat all")
        return nullcontext()

    monkeypatch.setattr(overlap, "_within", within)
    found = overlap.measure(Scale(CPU, small=True))
    names = [own.name for own in overlap.SETTINGS if own.leaves]
    assert found.values["failed"] == dict.fromkeys(names, "RuntimeError: no product leaves room")
    assert {row["setting"] for row in found.values["iterations"]} == {
        own.name for own in overlap.SETTINGS if not own.leaves
    }
    assert "**Failed: " in found.lines[-1]


def test_a_plan_without_pairs_has_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "SETTINGS", overlap.SETTINGS[:1])
    monkeypatch.setattr(overlap, "SMALL", overlap.SMALL.replace("--tp-comm-overlap ", ""))
    with pytest.raises(RuntimeError, match="the plan has no pairs on this rank"):
        overlap.measure(Scale(CPU, small=True))
