"""What spreading the vocabulary over the ranks costs beside the same schedule without vocabulary.

Unit costs of a stage, F = B = W = 1 and S = T = 0.25, and free communication. The bubble is 1 -
work / span with S and T counted as work. One barrier may cost 0.01 of bubble, two 0.02, with as
many microbatches more in flight.
"""

from functools import cache
from typing import Final

import pytest
from schedules.cases import DRAWN, few_trials

from megatron.schedules.catalogue import SCHEDULES
from megatron.schedules.costs import Costs
from megatron.schedules.held import in_flight
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.simulator.simulate import simulate

RANKS: Final = 8
STAGE: Final = Costs({"F": 1, "B": 1, "W": 1, "S": 0.25, "T": 0.25, "IF": 0, "IB": 0})
MICROBATCHES: Final = [24, pytest.param(64, marks=pytest.mark.full)]


@cache
def measured(schedule: str, vocabulary: str, microbatches: int) -> tuple[float, float]:
    """Return the bubble, and the most microbatches that a rank has in flight.

    A short search does, and a longer one finds no worse.
    """
    costs = STAGE.per_chunk(SCHEDULES[schedule].chunks)
    with few_trials():
        plan = make_plan(schedule, vocabulary, RANKS, microbatches, costs)
    return simulate(lower(plan, costs), costs).bubble_rate(), max(in_flight(plan))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("microbatches", MICROBATCHES)
@pytest.mark.parametrize(("vocabulary", "barriers"), [("vocab-2", 1), ("vocab-1", 2)])
@pytest.mark.parametrize("schedule", DRAWN)
def test_a_barrier_costs_a_hundredth_of_bubble_and_a_microbatch(
    schedule: str, vocabulary: str, barriers: int, microbatches: int
) -> None:
    without, held_without = measured(schedule, "none", microbatches)
    bubble, held = measured(schedule, vocabulary, microbatches)
    assert bubble <= without + 0.01 * barriers
    assert held <= held_without + barriers


@pytest.mark.parametrize("microbatches", MICROBATCHES)
@pytest.mark.parametrize(
    ("schedule", "promise"),
    [("1f1b", 8), ("zb-h1", 8), ("zb-v", 8), ("v-half", 5), ("v-min", 4)],
)
def test_what_is_held_without_vocabulary_is_the_promise_of_the_papers(
    schedule: str, promise: float, microbatches: int
) -> None:
    _, held = measured(schedule, "none", microbatches)
    assert held <= promise
