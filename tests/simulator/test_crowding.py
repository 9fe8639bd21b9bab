"""crowding.py: passes are slowed beside collectives, by no more than the share, and only then."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.schedules.costs import Costs
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.simulator.clocks import Clocks
from megatron.simulator.crowding import crowded, occupied
from megatron.simulator.simulate import simulate

COSTS = Costs(
    {"F": 1.0, "B": 2.0, "S": 0.25, "T": 0.25, "IF": 0.05, "IB": 0.05},
    {"X": 0.01, "G": 0.01, "C0": 0.01, "C1": 0.01, "C2": 0.01, "CIF": 0.01, "CIB": 0.01},
)


def test_without_collectives_nothing_changes() -> None:
    program = lower(make_plan("1f1b", "none", 4, 8, COSTS), COSTS)
    alone = Clocks(program, COSTS)
    assert crowded(alone, COSTS, 0.5) is COSTS
    assert occupied(alone) == [0.0] * 4


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(["vocab-1", "vocab-2", "interlaced"]), st.integers(1, 4), st.integers(1, 6))
def test_no_pass_is_slowed_by_more_than_the_share(vocabulary: str, ranks: int, m: int) -> None:
    program = lower(make_plan("1f1b", vocabulary, ranks, m, COSTS), COSTS)
    clocks = Clocks(program, COSTS)
    alone = simulate(program, COSTS)
    slowed = simulate(program, crowded(clocks, COSTS, 0.5))
    for rank, beside in enumerate(occupied(clocks)):
        assert 0 <= beside <= alone.work(rank) + 1e-9
        assert slowed.work(rank) == pytest.approx(alone.work(rank) + 0.5 * beside)


def test_interlaced_collectives_are_waited_for_and_slow_little() -> None:
    shares = {}
    for vocabulary in ("vocab-1", "interlaced"):
        program = lower(make_plan("1f1b", vocabulary, 4, 16, COSTS, shortened=False), COSTS)
        timeline = simulate(program, COSTS)
        occupying = sum(occupied(Clocks(program, COSTS)))
        shares[vocabulary] = occupying / sum(map(timeline.work, range(4)))
    assert shares["interlaced"] < shares["vocab-1"]


def test_costs_by_rank_and_chunk_keep_their_form() -> None:
    table = Costs({**COSTS.passes, "F": [[1.0, 1.0], [1.0, 1.0]], "B": [[2.0, 2.0], [2.0, 2.0]]})
    costs = Costs(table.passes, COSTS.comms)
    plan = make_plan("interleaved", "vocab-2", 2, 4, costs, chunks=2)
    slowed = crowded(Clocks(lower(plan, costs), costs), costs, 0.5)
    assert all(1 <= time <= 1.5 for row in slowed.passes["F"] for time in row)  # type: ignore[union-attr]
