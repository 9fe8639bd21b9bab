"""A program adds communication that nobody can disagree about, whatever the real costs are."""

import os
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import by_hand
from schedules.cases import Case, RandomCosts, blocks, cases, seeds, vocabularies

from megatron.schedules import lower as lowering
from megatron.schedules.block import Block, unroll
from megatron.schedules.lower import IN_FLIGHT_SENDS, Program, Run, Start, Wait, lane, lower
from megatron.schedules.needs import COMM_KINDS, Comm
from megatron.schedules.passes import PASS_KINDS, PassKind
from megatron.schedules.plan import VOCABULARY_BARRIERS, Plan, evaluation_plan
from megatron.schedules.registry import make_plan
from megatron.schedules.vocabulary import with_vocabulary
from megatron.simulator.simulate import Costs, simulate

ROOT = Path(__file__).resolve().parents[2]


def any_block(block: Block, vocabulary: str, microbatches: int) -> Plan:
    barriers = VOCABULARY_BARRIERS[vocabulary]
    return unroll(block if barriers is None else with_vocabulary(block, barriers), microbatches)


def of_case(case: Case, evaluate: bool) -> Plan:
    return evaluation_plan(case.plan) if evaluate else case.plan


plans = st.builds(of_case, cases(ranks=16), st.booleans()) | st.builds(
    any_block, blocks(), vocabularies, st.integers(1, 6)
)


def lowered(plan: Plan, seed: int) -> Program:
    return lower(plan, RandomCosts(seed, plan.ranks))


def started(program: Program, rank: int) -> list[Comm]:
    return [step.comm for step in program.rows[rank] if isinstance(step, Start)]


def simulated_ends(program: Program, costs: Costs) -> list[list[float]]:
    timeline = simulate(program, costs)
    for rank, row in enumerate(program.plan.rows):
        assert [span.label for span in timeline.compute(rank)] == list(map(str, row))
    return [[span.end for span in timeline.compute(rank)] for rank in range(timeline.ranks)]


@given(plans, seeds)
def test_passes_stay_in_the_order_of_the_plan(plan: Plan, seed: int) -> None:
    for row, steps in zip(plan.rows, lowered(plan, seed).rows, strict=True):
        assert tuple(step.item for step in steps if isinstance(step, Run)) == row


@given(plans, seeds)
def test_every_rank_takes_part_in_exactly_what_concerns_it(plan: Plan, seed: int) -> None:
    program = lowered(plan, seed)
    expected = [Counter[str]() for _ in plan.rows]
    collectives = [] if plan.barriers is None else ["CIF", "C1"]
    if plan.barriers == 2 and not plan.forward_only:
        collectives.append("C2")
    if plan.barriers is not None and plan.ranks > 1:  # what one rank broadcasts to the others
        collectives += ["C0"] if plan.forward_only else ["C0", "CIB"]
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


@given(plans, seeds)
def test_all_ranks_agree_on_the_order(plan: Plan, seed: int) -> None:
    """Any two ranks issue what they share in one order: on both sides of a link, in a group."""
    program = lowered(plan, seed)
    orders = [started(program, rank) for rank in range(plan.ranks)]
    for one, other in combinations(orders, 2):
        shared = set(one) & set(other)
        assert [c for c in one if c in shared] == [c for c in other if c in shared]


@given(plans, seeds)
def test_a_rank_sends_what_it_has(plan: Plan, seed: int) -> None:
    """A rank's own part of a communication exists before the rank issues it."""
    made_by = {"X": "F", "G": "B", "C0": "F", "C1": "S", "C2": "T", "CIF": "IF", "CIB": "B"}
    for rank, steps in enumerate(lowered(plan, seed).rows):
        done: set[str] = set()
        for step in steps:
            if isinstance(step, Run):
                done.add(str(step.item))
            elif isinstance(step, Start):
                comm = step.comm
                at = {"C0": len(plan.stages) - 1, "CIB": 0}.get(comm.kind, comm.stage)
                sender, chunk = plan.stages[at]
                if comm.kind in ("C1", "C2", "CIF"):
                    sender, chunk = rank, 0
                if sender == rank:
                    assert by_hand.label(made_by[comm.kind], comm.microbatch, chunk) in done


@given(plans, seeds)
def test_messages_that_nobody_here_waits_for_are_few(plan: Plan, seed: int) -> None:
    """At most two sends of a link at a time; so few buffers does the runtime keep."""
    for rank, steps in enumerate(lowered(plan, seed).rows):
        open_sends: Counter[tuple[object, ...]] = Counter()
        for step in steps:
            if isinstance(step, Run) or step.comm.kind not in ("X", "G"):
                continue
            if plan.stages[step.comm.stage][0] == rank:
                open_sends[lane(plan, step.comm)] += 1 if isinstance(step, Start) else -1
            assert all(count <= IN_FLIGHT_SENDS for count in open_sends.values())


@given(plans, seeds, seeds, st.sampled_from([0.0, 0.5, 7.0]))
def test_no_other_costs_make_it_deadlock_or_start_too_early(
    plan: Plan, assumed: int, real: int, comm: float
) -> None:
    """Run with costs it was not lowered for: it ends, and no pass starts before its needs."""
    costs = RandomCosts(real, plan.ranks)
    comms = {kind: comm * (1 + i) for i, kind in enumerate(COMM_KINDS)}
    found = simulated_ends(lowered(plan, assumed), Costs(costs.passes, comms))
    for real_row, least_row in zip(found, by_hand.end_times(plan, costs), strict=True):
        assert all(end >= least for end, least in zip(real_row, least_row, strict=True))


@given(plans, seeds)
def test_with_true_costs_and_free_communication_it_takes_the_time_of_the_plan(
    plan: Plan, seed: int
) -> None:
    """Every wait is as late as it may be, except that a rank short of buffers waits for one."""
    costs = RandomCosts(seed, plan.ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "IN_FLIGHT_SENDS", 10**6)
        program = lower(plan, costs)
    assert simulated_ends(program, Costs(costs.passes)) == by_hand.end_times(plan, costs)


@settings(max_examples=25)
@given(cases(vocabulary=st.just("none")), seeds)
def test_two_buffers_cost_1f1b_no_time(case: Case, seed: int) -> None:
    costs = RandomCosts(seed, case.ranks)
    program = lower(case.plan, costs)
    assert simulated_ends(program, Costs(costs.passes)) == by_hand.end_times(case.plan, costs)


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
        "from megatron.schedules.registry import make_plan\n"
        "print(*(lower(make_plan('1f1b', v, 4, 9)) for v in ('none', 'vocab-1', 'vocab-2')))\n"
    )
    programs = set()
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        programs.add(subprocess.check_output([sys.executable, "-c", code], env=environment))
    assert len(programs) == 1


@settings(max_examples=60)
@given(cases(ranks=6), st.sets(st.sampled_from(PASS_KINDS)), seeds, st.sampled_from([1, 1e9]))
def test_passes_may_take_no_time(case: Case, free: set[PassKind], seed: int, unit: float) -> None:
    """Whatever the unit of time is: nothing small is added to keep what depends on it apart."""
    costs = RandomCosts(seed, case.ranks)
    for kind, times in costs.passes.items():
        costs.passes[kind] = [0.0 if kind in free else time * unit for time in times]
    plan = make_plan("1f1b", *case, costs)
    found = simulated_ends(lower(plan, costs), Costs(costs.passes))
    assert max(map(max, found)) == pytest.approx(max(map(max, by_hand.end_times(plan, costs))))
