"""No plan is faster than the lower bound that is known without it."""

import pytest
from harness.marks import full
from schedules.cases import few_trials, random_costs

from megatron.schedules.catalogue import SCHEDULES
from megatron.schedules.make_plan import make_plan, one_microbatch_of
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.request import Request
from megatron.schedules.search.bound import least_time_by
from megatron.schedules.timing import earliest
from megatron.schedules.treatments import TREATMENTS

QUICK = ("1f1b", "hanayo", "zb-h1", "v-half")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("vocabulary", TREATMENTS)
@pytest.mark.parametrize("schedule", [name if name in QUICK else full(name) for name in SCHEDULES])
def test_no_plan_is_faster(schedule: str, vocabulary: str, seed: int) -> None:
    """Passes that a barrier follows come before the last B of their rank."""
    ranks, microbatches = 3, 7
    costs = random_costs(seed, ranks, SCHEDULES[schedule].chunks)
    one = one_microbatch_of(Request(schedule, vocabulary, ranks, 1, costs))
    with few_trials():
        plan = make_plan(schedule, vocabulary, ranks, microbatches, costs)

    def bound(*awaited: PassKind) -> float:
        def time_of(rank: int, item: Pass) -> float:
            return costs.of_pass(one, rank, item)

        return least_time_by(one, time_of, microbatches, [*awaited])

    least = bound(*TREATMENTS[vocabulary].contributing)
    assert bound() <= least <= earliest(plan, costs).end + 1e-9


def test_a_long_output_layer_holds_the_backward_up() -> None:
    """The first rank can end with its last B only once the last S of the other one is done."""
    one = one_microbatch_of(Request("1f1b", "vocab-2", 2, 1))
    times = {"F": 1.0, "B": 1.0, "S": 10.0, "T": 0.0, "IF": 0.0, "IB": 0.0}

    def time_of(rank: int, item: Pass) -> float:
        return times[item.kind]

    work = 4 * 12.0
    assert least_time_by(one, time_of, 4) == 1 + work
    assert least_time_by(one, time_of, 4, ["S"]) == 1 + work + 1
