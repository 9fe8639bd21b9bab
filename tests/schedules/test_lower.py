"""A program adds communication that nobody can disagree about, whatever the real costs are."""

import os
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import by_hand
from schedules.cases import (
    PIPELINED,
    Case,
    cases,
    looking_ahead,
    plans_of_blocks,
    random_costs,
    seeds,
    with_comms,
)

from megatron.schedules import lower as lowering
from megatron.schedules.costs import Costs
from megatron.schedules.lower import IN_FLIGHT_SENDS, Program, Run, Start, Wait, lane, lower
from megatron.schedules.needs import Comm, CommKind
from megatron.schedules.passes import PASS_KINDS, PassKind
from megatron.schedules.plan import Plan, evaluation_plan
from megatron.schedules.timing import earliest
from megatron.simulator import clocks
from megatron.simulator.simulate import simulate

ROOT = Path(__file__).resolve().parents[2]


def of_case(case: Case, evaluate: bool, ahead: int) -> Plan:
    plan = looking_ahead(case.plan, ahead)
    return evaluation_plan(plan) if evaluate else plan


def some_cases(*treatments: str) -> st.SearchStrategy[Case]:
    """Draw large plans in the order of their block, and small ones that costs have shortened."""
    vocabulary = st.sampled_from(treatments)
    return cases(vocabulary=vocabulary, passes=100) | cases(
        vocabulary=vocabulary, passes=20, shortened=True
    )


switches = st.booleans(), st.integers(-1, 9)
overlapped = st.builds(of_case, some_cases(*PIPELINED), *switches) | plans_of_blocks
plans = overlapped | st.builds(of_case, some_cases("interlaced"), *switches)


def lowered(plan: Plan, seed: int) -> Program:
    return lower(plan, random_costs(seed, plan.ranks, plan.chunks))


def started(program: Program, rank: int) -> list[Comm]:
    return [step.comm for step in program.rows[rank] if isinstance(step, Start)]


class _WithoutQueues(clocks.Numbered):
    """A program whose communications each have a lane of their own."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.queues = len(self.comms)
        self.lanes = list(range(self.queues))


def simulated_ends(program: Program, costs: Costs) -> list[list[float]]:
    timeline = simulate(program, costs)
    for rank, row in enumerate(program.plan.rows):
        assert [span.label for span in timeline.compute(rank)] == list(map(str, row))
    return [[span.end for span in timeline.compute(rank)] for rank in range(timeline.ranks)]


@settings(max_examples=examples(40))
@given(plans, seeds)
def test_passes_stay_in_the_order_of_the_plan(plan: Plan, seed: int) -> None:
    for row, steps in zip(plan.rows, lowered(plan, seed).rows, strict=True):
        assert tuple(step.item for step in steps if isinstance(step, Run)) == row


@settings(max_examples=examples(40))
@given(plans, seeds)
def test_every_rank_takes_part_in_exactly_what_concerns_it(plan: Plan, seed: int) -> None:
    program = lowered(plan, seed)
    expected = [Counter[str]() for _ in plan.rows]
    collectives = []
    barriers = plan.treatment.barriers
    if barriers:
        collectives += ["CIF", *(barrier.kind for barrier in barriers)]
        if plan.forward_only and barriers[-1].carries == ("gradient",):
            collectives.pop()  # it is only for the backward
        if plan.ranks > 1 or plan.treatment.synchronous:
            collectives.append("C0")
        if plan.ranks > 1 and not plan.forward_only:
            collectives.append("CIB")
    for i in range(plan.microbatches):
        for stage, (source, target) in enumerate(pairwise(rank for rank, _ in plan.stages)):
            if source != target:
                names = [f"X{i} from {stage}"]
                names += [] if plan.forward_only else [f"G{i} from {stage + 1}"]
                expected[source].update(names)
                expected[target].update(names)
        for counter in expected:
            counter.update(f"{kind} {i}" for kind in collectives)
    for rank, counter in enumerate(expected):
        assert Counter(map(str, started(program, rank))) == counter


@settings(max_examples=examples(40))
@given(plans, seeds)
def test_every_start_has_one_wait_and_it_comes_later(plan: Plan, seed: int) -> None:
    for steps in lowered(plan, seed).rows:
        under_way: set[Comm] = set()
        finished: set[Comm] = set()
        for step in steps:
            if isinstance(step, Start):
                assert step.comm not in under_way | finished
                under_way.add(step.comm)
            elif isinstance(step, Wait):
                under_way.remove(step.comm)
                finished.add(step.comm)
        assert not under_way


@settings(max_examples=examples(40))
@given(plans, seeds)
def test_all_ranks_agree_on_the_order(plan: Plan, seed: int) -> None:
    """Any two ranks issue what they share in one order: on both sides of a link, in a group."""
    program = lowered(plan, seed)
    orders = [started(program, rank) for rank in range(plan.ranks)]
    for one, other in combinations(orders, 2):
        shared = set(one) & set(other)
        assert [c for c in one if c in shared] == [c for c in other if c in shared]


@settings(max_examples=examples(40))
@given(plans, seeds)
def test_a_rank_sends_what_it_has(plan: Plan, seed: int) -> None:
    """A rank's own part of a communication exists before the rank issues it."""
    made_by = {"X": "F", "G": "B", "C0": "F", "C1": "S", "C2": "T", "CIF": "IF", "CIB": "B"}
    if plan.treatment.name == "naive":
        made_by |= {"C2": "E", "C3": "T"}
    for rank, steps in enumerate(lowered(plan, seed).rows):
        done: set[str] = set()
        for step in steps:
            if isinstance(step, Run):
                done.add(str(step.item))
            elif isinstance(step, Start):
                comm = step.comm
                at = {"C0": len(plan.stages) - 1, "CIB": 0}.get(comm.kind, comm.stage)
                senders = {plan.stages[at]}
                if comm.kind in ("C1", "C2", "C3", "CIF"):
                    senders = {(rank, 0)}
                elif comm.kind == "CIB" and plan.ahead_stage is not None:
                    senders.add(plan.stages[plan.ahead_stage])
                for chunk in (chunk for sender, chunk in senders if sender == rank):
                    assert by_hand.label(made_by[comm.kind], comm.microbatch, chunk) in done


@settings(max_examples=examples(40))
@given(plans, seeds)
def test_messages_that_nobody_here_waits_for_are_few(plan: Plan, seed: int) -> None:
    """At most two messages of a link at a time; so few buffers does the runtime keep."""
    for rank, steps in enumerate(lowered(plan, seed).rows):
        open_sends: Counter[tuple[object, ...]] = Counter()
        for step in steps:
            if isinstance(step, Run) or step.comm.kind not in ("X", "G"):
                continue
            if plan.stages[step.comm.stage][0] == rank:
                open_sends[lane(plan, step.comm)] += 1 if isinstance(step, Start) else -1
            assert all(count <= IN_FLIGHT_SENDS for count in open_sends.values())


@settings(max_examples=examples(40))
@given(plans, seeds, seeds, st.sampled_from([0, 2, 40]))
def test_no_other_costs_make_it_deadlock_or_start_too_early(
    plan: Plan, assumed: int, real: int, longest: int
) -> None:
    """Run with costs it was not lowered for: it ends, and no pass starts before its needs."""
    costs = with_comms(random_costs(real, plan.ranks, plan.chunks), real, longest)
    found = simulated_ends(lowered(plan, assumed), costs)
    for real_row, least_row in zip(found, by_hand.end_times(plan, costs), strict=True):
        assert all(end >= least for end, least in zip(real_row, least_row, strict=True))


@settings(max_examples=examples(40))
@given(overlapped, seeds, st.sampled_from([0, 2, 40]))
def test_with_true_costs_it_takes_the_time_of_the_plan(plan: Plan, seed: int, longest: int) -> None:
    """Everything is started as early, and waited for as late, as it may be.

    The plan lets a communication begin as soon as its data exists. A real one differs in two
    things and no other, and both are taken away here: it waits until the one before it in its lane
    is done, and a rank waits for the first of three messages that it sends and does not need.
    """
    costs = with_comms(random_costs(seed, plan.ranks, plan.chunks), seed, longest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "IN_FLIGHT_SENDS", 10**6)
        patch.setattr(clocks, "Numbered", _WithoutQueues)
        found = simulated_ends(lower(plan, costs), costs)
    assert found == by_hand.end_times(plan, costs)
    assert found == [list(row) for row in earliest(plan, costs).ends]


@settings(max_examples=examples(80))
@given(overlapped, seeds, st.sampled_from([2, 40]))
def test_nobody_waits_for_a_collective_that_only_others_need(
    plan: Plan, seed: int, longest: int
) -> None:
    """However far a rank looks embeddings up ahead of the others, it takes the plan's time.

    Messages take no time, so that they hold nobody up, and collectives do not queue in their lane.
    """
    costs = with_comms(random_costs(seed, plan.ranks, plan.chunks), seed, longest)
    costs = replace(costs, comms={**costs.comms, "X": 0.0, "G": 0.0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clocks, "Numbered", _WithoutQueues)
        found = simulated_ends(lower(plan, costs), costs)
    assert found == by_hand.end_times(plan, costs)


@settings(max_examples=examples(40))
@given(some_cases("none"), seeds, st.integers(0, 40))
def test_messages_no_longer_than_the_passes_cost_what_they_do_in_the_plan(
    case: Case, seed: int, longest: int
) -> None:
    """A link is free again before its rank has the next message, and two buffers are enough."""
    costs = random_costs(seed, case.ranks, case.chunks)
    tables: Any = costs.passes
    forward, backward = (
        min(float(time) for row in tables[kind] for time in row) for kind in ("F", "B")
    )
    comms: dict[CommKind, float] = {"X": min(forward, longest / 4), "G": min(backward, longest / 4)}
    real = Costs(costs.passes, comms)
    assert simulated_ends(lower(case.plan, real), real) == by_hand.end_times(case.plan, real)


@settings(max_examples=examples(40))
@given(some_cases("interlaced"), seeds, st.integers(0, 9))
def test_ranks_meet_for_a_synchronous_output_layer(case: Case, seed: int, longest: int) -> None:
    """S begins on all ranks at one time, and so does T, and nobody works before C2 is done."""
    costs = with_comms(random_costs(seed, case.ranks, case.chunks), seed, longest)
    timeline = simulate(lower(case.plan, costs), costs)
    rows = [timeline.compute(rank) for rank in range(case.ranks)]
    for i in range(case.microbatches):
        at = [[span.label for span in row].index(f"S{i}") for row in rows]
        met = [(row[n], row[n + 1]) for row, n in zip(rows, at, strict=True)]
        assert {second.label for _, second in met} == {f"T{i}"}
        assert len({first.start for first, _ in met}) == 1
        assert {second.start for _, second in met} == {
            max(first.end for first, _ in met) + costs.of_comm(Comm("C1", i))
        }
        done = max(second.end for _, second in met) + costs.of_comm(Comm("C2", i))
        assert all(row[n + 2].start >= done for row, n in zip(rows, at, strict=True))


@settings(max_examples=examples(40))
@given(plans)
def test_communications_of_one_lane_have_the_same_members(plan: Plan) -> None:
    members: dict[tuple[object, ...], set[frozenset[int]]] = defaultdict(set)
    takes_part: dict[Comm, set[int]] = defaultdict(set)
    program = lower(plan)
    for rank in range(plan.ranks):
        for comm in started(program, rank):
            takes_part[comm].add(rank)
    for comm, ranks in takes_part.items():
        members[lane(plan, comm)].add(frozenset(ranks))
    assert all(len(groups) == 1 for groups in members.values())


def test_every_process_lowers_to_the_same_program() -> None:
    """Every rank plans and lowers on its own: nothing may hang on the order of a set."""
    code = (
        "from megatron.schedules.lower import lower\n"
        "from megatron.schedules.make_plan import make_plan\n"
        "for vocabulary in ('none', 'vocab-1', 'vocab-2', 'naive', 'interlaced'):\n"
        "    for schedule in ('1f1b', 'zb-1p'):\n"
        "        print(lower(make_plan(schedule, vocabulary, 3, 3)))\n"
    )
    programs = set()
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        programs.add(subprocess.check_output([sys.executable, "-c", code], env=environment))
    assert len(programs) == 1


@settings(max_examples=examples(60))
@given(
    cases(passes=30, shortened=True),
    st.sets(st.sampled_from(PASS_KINDS)),
    st.sampled_from([1, 1e9]),
)
def test_passes_may_take_no_time(case: Case, free: set[PassKind], unit: float) -> None:
    """Whatever the unit of time is: nothing small is added to keep what depends on it apart."""
    tables: Any = case.costs.passes
    costs = Costs(
        {
            kind: [[0.0 if kind in free else time * unit for time in row] for row in times]
            for kind, times in tables.items()
        }
    )
    found = simulated_ends(lower(case.plan, costs), costs)
    assert max(map(max, found)) == pytest.approx(max(map(max, by_hand.end_times(case.plan, costs))))
