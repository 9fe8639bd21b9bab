"""The run that is taken by what is known of several: the rule that all searches share."""

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from megatron.planning.known import NEAR, Known, best_known, costs
from megatron.planning.run_memory import Fullest


class Run(NamedTuple):
    """A run with its known time and memory."""

    known: Known
    reluctance: float = 0.0


def runs(most: int) -> st.SearchStrategy[list[Run]]:
    def run(seconds: float, peak: int, reluctance: int) -> Run:
        return Run(Known("plan", seconds, Fullest(0, peak, 0.0), True), reluctance)

    made = st.builds(run, st.floats(1, 1.05), st.integers(1, 5), st.integers(0, 2))
    return st.lists(made, max_size=most)


@given(able=runs(8))
def test_no_run_is_taken_that_another_dominates(able: list[Run]) -> None:
    taken = best_known(able)
    assert (taken is None) == (not able)
    if taken is None:
        return
    for other in able:
        as_good = all(mine <= its for mine, its in zip(costs(other), costs(taken), strict=True))
        assert not as_good or costs(other) == costs(taken)
        assert costs(taken)[0] * (1 - NEAR) <= costs(other)[0]


@given(able=runs(8))
def test_the_least_reluctance_comes_before_the_least_memory(able: list[Run]) -> None:
    taken = best_known(able, lambda run: run.reluctance)
    fastest = min((costs(run)[0] for run in able), default=0.0)
    near = [run for run in able if costs(run)[0] * (1 - NEAR) <= fastest]
    prices = sorted((run.reluctance, costs(run)[1]) for run in near)
    assert taken is None or (taken.reluctance, costs(taken)[1]) == prices[0]


@given(able=runs(6), rivals=runs(3))
def test_a_rival_is_never_taken_and_nothing_slower_than_near_it(
    able: list[Run], rivals: list[Run]
) -> None:
    taken = best_known(able, rivals=rivals)
    if taken is None:
        fastest = min((costs(run)[0] for run in rivals), default=0.0)
        assert all(costs(run)[0] * (1 - NEAR) > fastest for run in able)
    else:
        assert any(taken is run for run in able)
        assert all(costs(taken)[0] * (1 - NEAR) <= costs(run)[0] for run in rivals)
