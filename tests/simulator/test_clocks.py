"""The clocks of a program solve its equations, found here by repeating them until nothing changes.

The equations: a pass ends after its time; a communication begins when all have issued it and the
one before it in its lane has ended; who waits goes on when it ends.
"""

from collections import defaultdict

from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.schedules.costs import UNIT_COSTS, Costs
from megatron.schedules.lower import Program, Run, Start, lane, lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import COMM_KINDS, Comm
from megatron.simulator.clocks import Clocks, comm_time, pass_time
from megatron.simulator.simulate import simulate

schedules = st.sampled_from(["1f1b", "interleaved", "zb-v", "hanayo"])
treatments = st.sampled_from(["none", "vocab-2", "vocab-1", "interlaced"])
times = st.lists(st.integers(0, 5), min_size=len(COMM_KINDS), max_size=len(COMM_KINDS))


def repeated(program: Program, costs: Costs) -> tuple[list[list[float]], dict[Comm, float]]:
    """Return the time after every instruction, and the end of every communication."""
    issued: dict[Comm, float] = defaultdict(float)
    ends: dict[Comm, float] = defaultdict(float)
    before = ones_before(program)
    while True:
        known = dict(ends)
        after = [clocks(program, costs, rank, issued, ends) for rank in range(program.plan.ranks)]
        for comm, time in issued.items():
            free = ends[before[comm]] if comm in before else 0.0
            ends[comm] = max(time, free) + comm_time(program, costs, comm)
        if known == ends:
            return after, known


def ones_before(program: Program) -> dict[Comm, Comm]:
    """Return for every communication but the first the one before it in its lane."""
    before: dict[Comm, Comm] = {}
    for row in program.rows:
        last: dict[object, Comm] = {}
        for step in row:
            if isinstance(step, Start):
                queue = lane(program.plan, step.comm)
                if queue in last:
                    before[step.comm] = last[queue]
                last[queue] = step.comm
    return before


def clocks(
    program: Program, costs: Costs, rank: int, issued: dict[Comm, float], ends: dict[Comm, float]
) -> list[float]:
    """Return a rank's time after every instruction, by the ends known so far."""
    clock, after = 0.0, list[float]()
    for step in program.rows[rank]:
        if isinstance(step, Run):
            clock += pass_time(program, costs, rank, step.item)
        elif isinstance(step, Start):
            issued[step.comm] = max(issued[step.comm], clock)
        else:
            clock = max(clock, ends[step.comm])
        after.append(clock)
    return after


@settings(max_examples=examples(40), deadline=None)
@given(schedules, treatments, st.integers(1, 4), st.integers(1, 6), times, times)
def test_clocks_solve_the_equations_of_their_program(
    schedule: str, treatment: str, ranks: int, microbatches: int, one: list[int], other: list[int]
) -> None:
    """The second costs are simulated by the numbers of the first simulation."""
    program = lower(make_plan(schedule, treatment, ranks, microbatches, shortened=False))
    numbered = None
    for drawn in (one, other):
        comms = dict(zip(COMM_KINDS, map(float, drawn), strict=True))
        passes = {kind: 4.0 * UNIT_COSTS.time(kind, 0) for kind in UNIT_COSTS.passes}
        costs = Costs(passes, comms)
        found = Clocks(numbered or program, costs)
        numbered = found.numbered
        after, ends = repeated(program, costs)
        assert found.after == after
        assert dict(zip(numbered.comms, found.ends, strict=True)) == ends


@settings(max_examples=examples(20), deadline=None)
@given(schedules, treatments, st.integers(1, 4), st.integers(1, 6), times)
def test_a_timeline_has_the_end_and_the_idle_time_of_its_clocks(
    schedule: str, treatment: str, ranks: int, microbatches: int, drawn: list[int]
) -> None:
    program = lower(make_plan(schedule, treatment, ranks, microbatches, shortened=False))
    costs = Costs(UNIT_COSTS.passes, dict(zip(COMM_KINDS, map(float, drawn), strict=True)))
    found, timeline = Clocks(program, costs), simulate(program, costs)
    assert (found.end, found.idle()) == (timeline.end, timeline.idle())
    assert [found.work(rank) for rank in range(ranks)] == list(map(timeline.work, range(ranks)))
