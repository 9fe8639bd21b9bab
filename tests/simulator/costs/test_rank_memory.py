"""The memory of a rank: an embedding gradient stays until both IB and the wait for CIB are over."""

from dataclasses import replace

import pytest

from megatron.schedules.costs import UNIT_COSTS
from megatron.schedules.lower import Program, Run, Start, Wait, lower
from megatron.schedules.make_plan import plan_for
from megatron.schedules.request import Request
from megatron.simulator.costs.count import PassCount, RankCount
from megatron.simulator.costs.rank_memory import RankMemory, held

COUNT = RankCount({("IB", 0): PassCount(left=-1)}, {("CIB", 0): PassCount(left=1, peak=1)})
"""A gradient takes one byte; a count lets IB free it."""


def alive(program: Program, rank: int) -> list[float]:
    """Gradients that were begun to be broadcast, less those whose IB and wait are both over."""
    begun, read, waited, found = set[object](), set[object](), set[object](), []
    for step in program.rows[rank]:
        if isinstance(step, Run):
            if step.item.kind == "IB":
                read.add((step.item.microbatch, step.item.slice))
        elif step.comm.kind == "CIB":
            unit = step.comm.microbatch, step.comm.slice
            (begun if isinstance(step, Start) else waited).add(unit)
        found.append(float(len(begun - (read & waited))))
    return found


@pytest.mark.parametrize("cib", [0.0, 3.0])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "interleaved"])
def test_the_later_of_ib_and_the_wait_frees_a_gradient(schedule: str, cib: float) -> None:
    costs = replace(UNIT_COSTS, comms={"CIB": cib})
    plan = plan_for(Request(schedule, "vocab-2", 2, 8, costs))
    program = lower(plan, costs)
    source = plan.stages[0][0]
    after = [now for _, now in held(program, RankMemory(COUNT, 0.0), source)]
    assert after == alive(program, source)
    assert max(after) > 0
    assert after[-1] == 0
    assert {type(step) for step in program.rows[source]} == {Run, Start, Wait}
