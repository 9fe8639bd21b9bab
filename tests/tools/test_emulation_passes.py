"""Emulated ranks: sums show whether all came to its place, and clocks whether it took its time."""

from collections import deque
from dataclasses import dataclass, replace

import pytest
import torch
from correctness.rank_runs import CPU, make_pipeline_groups
from harness.rank_pool import RankPool
from runtime.test_placeholder_passes import CASES

from megatron.parallel.lanes import Done, make_lane
from megatron.runtime import timeline
from megatron.runtime.executor import Executor
from megatron.runtime.offload import HostBuffers, HostCopies
from megatron.schedules.costs import Costs
from megatron.schedules.lower import Start, lower
from megatron.schedules.make_plan import find_plan
from megatron.schedules.needs import Comm
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan
from megatron.schedules.request import Request
from tools.emulation import emulated_communicator, emulated_passes, pace
from tools.emulation.emulated_communicator import EmulatedCommunicator, Link, Message
from tools.emulation.emulated_passes import (
    EXCHANGES,
    MODULUS,
    EmulatedPasses,
    Pacer,
    mix,
    overheads_of,
)

RANKS = 3


def run_emulated(rank: int, world_size: int, *, plan: Plan, iterations: int) -> list[int]:
    """Return this rank's checksum of every iteration of a program whose passes take no time."""
    groups = make_pipeline_groups()
    lane, copies = make_lane(CPU, world_size, "vocabulary"), make_lane(CPU, 2, "host")
    pacer = Pacer(rank, lambda item: 0.0, lambda comm: 0.0, overshoot=0.0)
    program = lower(plan)
    host = HostCopies(program, rank, (), copies, HostBuffers(CPU), CPU) if plan.offloaded else None
    passes = EmulatedPasses(plan, rank, host=host)
    communicator = EmulatedCommunicator(groups, plan, passes, lane, lambda comm: 0.0, pacer)
    checksums = []
    for _ in range(iterations):
        passes.checksum = 0
        Executor(passes, communicator, host=host).run(program, pacer)
        checksums.append(passes.checksum)
        assert not len(passes.store)
    lane.close()
    copies.close()
    return checksums


@dataclass
class ByHand:
    """What the passes of one slice of a microbatch come to, from the flow of the data alone."""

    plan: Plan
    microbatch: int
    slice: int
    sums: list[int]

    def done(self, kind: PassKind, rank: int, *taken: int, chunk: int = 0) -> int:
        value = mix(Pass(kind, self.microbatch, chunk, self.slice), rank, *taken)
        self.sums[rank] += value
        return value

    def everywhere(self, kind: PassKind, *taken: list[int]) -> list[int]:
        columns = zip(*taken, strict=True) if taken else [()] * RANKS
        return [self.done(kind, rank, *values) for rank, values in enumerate(columns)]

    def forward(self, before: list[int]) -> list[int]:
        """Return what F comes to on every stage; ``before`` is that of the slice before."""
        came = [sum(self.everywhere("IF"))] if self.plan.treatment.is_sharded else []
        outputs = []
        for stage, (rank, chunk) in enumerate(self.plan.stages):
            came = [self.done("F", rank, *came, *before[stage : stage + 1], chunk=chunk)]
            outputs += came
        return outputs

    def backward(self, outputs: list[int], after: list[int]) -> list[int]:
        """Return what B comes to on every stage; ``after`` is that of the slice after."""
        split, gradients = self.plan.treatment.is_sharded, [0] * len(outputs)
        gradient = self.output_layer(outputs[-1]) if split else outputs[-1]
        for stage, (rank, chunk) in reversed(list(enumerate(self.plan.stages))):
            taken = (outputs[stage], gradient, *after[stage : stage + 1])
            gradients[stage] = gradient = self.done("B", rank, *taken, chunk=chunk)
            if self.plan.split_backward:
                self.done("W", rank, gradient, chunk=chunk)
        if split:
            self.everywhere("IB", [gradient] * RANKS)
        return gradients

    def output_layer(self, x: int) -> int:
        own = self.everywhere("S", [x] * RANKS)
        merged = [[sum(own)] * RANKS]
        if self.plan.treatment.name == "naive":
            maximum = [max(own)] * RANKS
            own = self.everywhere("E", own, maximum)
            merged = [maximum, [sum(own)] * RANKS]
        after = self.everywhere("T", own, *merged)
        if self.plan.treatment.name != "vocab-2":
            return sum(after)
        t = Pass("T", self.microbatch, slice=self.slice)
        return sum(mix(t, rank, value, sum(own)) for rank, value in enumerate(own))


def follow(plan: Plan, microbatch: int, sums: list[int]) -> None:
    slices = [ByHand(plan, microbatch, s, sums) for s in range(plan.slices)]
    outputs: list[list[int]] = []
    for own in slices:
        outputs.append(own.forward(outputs[-1] if outputs else []))
    gradients: list[int] = []
    for own, left in reversed(list(zip(slices, outputs, strict=True))):
        gradients = own.backward(left, gradients)


@pytest.mark.parametrize(
    ("schedule", "treatment", "slices", "offloaded"),
    [
        *((*case, 1, 0) for case in CASES),
        ("1f1b", "vocab-1", 4, 0),
        ("zb-h1", "vocab-2", 2, 1),
        ("interleaved", "none", 3, 1),
        ("v-half", "vocab-2", 2, 2),
    ],
)
def test_checksums_are_those_of_the_flow_of_the_data(
    schedule: str, treatment: str, slices: int, offloaded: int, ranks: RankPool
) -> None:
    plan = find_plan(Request(schedule, treatment, RANKS, 7, slices=slices))[0]
    plan = replace(plan, offloaded=offloaded)
    moved = {step.comm.kind for step in lower(plan).rows[0] if isinstance(step, Start)} & {"O", "L"}
    assert moved == ({"O", "L"} if offloaded else set())
    sums = [0] * RANKS
    for i in range(plan.microbatches):
        follow(plan, i, sums)
    expected = [[value % MODULUS] * 2 for value in sums]
    assert ranks.run(run_emulated, RANKS, plan=plan, iterations=2) == expected


def test_mix_depends_on_everything() -> None:
    found = [
        mix(Pass("F", 1), 0, 5, 6),
        mix(Pass("B", 1), 0, 5, 6),
        mix(Pass("F", 2), 0, 5, 6),
        mix(Pass("F", 1, 1), 0, 5, 6),
        mix(Pass("F", 1, 0, 1), 0, 5, 6),
        mix(Pass("F", 1), 1, 5, 6),
        mix(Pass("F", 1), 0, 6, 5),
        mix(Pass("F", 1), 0, 5),
    ]
    assert len(set(found)) == len(found)


class FakeTime:
    """A clock that only sleeping moves, and looking at it by a tick."""

    TICK = 0.001

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        self.now += self.TICK
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    clock = FakeTime()
    for module in (emulated_passes, emulated_communicator, pace, timeline):
        monkeypatch.setattr(module, "time", clock)
    return clock


def pacer_of(pass_seconds: float, comm_seconds: float = 0.0) -> Pacer:
    return Pacer(0, lambda item: pass_seconds, lambda comm: comm_seconds, overshoot=0.0)


def test_passes_last_and_only_what_lies_between_is_overhead(clock: FakeTime) -> None:
    pacer = pacer_of(pass_seconds=2.0)
    pacer.begin(start := clock.now)
    with pacer.span(Pass("F", 0)):
        clock.sleep(0.5)  # emulating the pass is part of it
    assert clock.now == pytest.approx(start + 2.0, abs=10 * FakeTime.TICK)
    clock.sleep(0.25)
    with pacer.waiting(Comm("C1", 0)):
        clock.sleep(7.0)
    with pacer.span(Pass("B", 0)):
        pass
    assert overheads_of(pacer.spans()) == pytest.approx([0.0, 0.25], abs=10 * FakeTime.TICK)
    assert [span.length for span in pacer.spans()] == pytest.approx([2.0, 7.0, 2.0], abs=0.01)


@pytest.mark.parametrize("waits", [(0.0, 0.0), (2.0, 1.0), (4.0, 4.0), (0.0, 8.0), (6.0, 2.0)])
def test_a_pair_lasts_as_long_as_in_the_simulator(
    waits: tuple[float, float], clock: FakeTime
) -> None:
    """The real turns: each pass works while the other one waits."""
    of_kind = dict(zip("FB", waits, strict=True))
    plan = Plan.from_text("microbatches 2\nstages 0.0\nvocabulary none\n0: F0 F1|B0 B1\n")
    costs = Costs({"F": 8.0, "B": 10.0}, waits={"F": waits[0], "B": waits[1]})
    pair = Pass("F", 1), Pass("B", 0)
    pacer = Pacer(
        0,
        lambda item: costs.of_pass(plan, 0, item),
        lambda comm: 0.0,
        overshoot=0.0,
        waits=lambda item: of_kind[item.kind],
    )
    start = clock.now
    with pacer.pair(*pair) as began:
        pacer.turns.run(
            lambda: pacer.in_turns(pair[1]),
            lambda: pacer.in_turns(pair[0]),
            began=lambda own: began(pair[1 - own]),
        )
    assert clock.now - start == pytest.approx(costs.of_pair(plan, 0, pair), abs=200 * FakeTime.TICK)
    assert len(overheads_of(pacer.spans())) == 1


@pytest.mark.parametrize("waits", [0.0, 2.0, 6.0])
@pytest.mark.parametrize("kinds", [("B", "W"), ("F", "W"), ("F", "S"), ("B", "T"), ("B", "IB")])
def test_other_pairs_last_as_long_as_in_the_simulator(
    kinds: tuple[PassKind, PassKind], waits: float, clock: FakeTime
) -> None:
    """The first pass waits at every collective; W works in pieces, and other passes in one."""
    plan = Plan.from_text("microbatches 1\nstages 0.0\nvocabulary none\n0: F0 B0 W0\n")
    first, second = kinds
    costs = Costs(
        {first: 9.0, second: 7.0},
        waits={first: waits},
        journeys=dict.fromkeys(("F", "B", "W"), EXCHANGES),
    )
    pair = Pass(first, 0), Pass(second, 1)
    pacer = Pacer(
        0,
        lambda item: costs.of_pass(plan, 0, item),
        lambda comm: 0.0,
        overshoot=0.0,
        waits=lambda item: costs.waits_of(plan, 0, item),
    )
    start = clock.now
    with pacer.pair(*pair) as began:
        pacer.turns.run(
            lambda: pacer.in_turns(pair[0]),
            lambda: pacer.in_turns(pair[1]),
            began=lambda own: began(pair[own]),
        )
    assert clock.now - start == pytest.approx(costs.of_pair(plan, 0, pair), abs=200 * FakeTime.TICK)
    assert len(overheads_of(pacer.spans())) == 1


@pytest.mark.parametrize("seconds", [0.0, 3.0])
def test_collectives_keep_their_lane_busy(seconds: float, clock: FakeTime) -> None:
    start = clock.now
    assert pacer_of(1.0, seconds).timed(Comm("C0", 0), lambda: "result")() == "result"
    assert clock.now == pytest.approx(start + seconds, abs=10 * FakeTime.TICK)


@pytest.mark.parametrize(
    ("sent", "through"),
    [
        pytest.param([0.0, 0.0], [12.0, 14.0], id="the link is busy with the first"),
        pytest.param([0.0, 15.0], [12.0, 17.0], id="the second is sent late"),
        pytest.param([15.0, 15.0], [17.0, 19.0], id="the receiver was there first"),
    ],
)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_messages_arrive_as_in_the_simulator(
    sent: list[float], through: list[float], order: tuple[int, int], clock: FakeTime
) -> None:
    """A message of 2 s begins when its link is free and both sides have issued it, here at 10 s."""
    clock.now = 10.0
    link = Link(deque())
    messages = [Message(link, Done(torch.tensor([7.0, time])), 2.0, pacer_of(1.0)) for time in sent]
    latest = 0.0
    for index in order:
        latest = max(latest, through[index])
        came = messages[index].wait()
        assert came is not None
        assert came.tolist() == [7.0, sent[index]]
        assert clock.now == pytest.approx(latest, abs=0.1)
