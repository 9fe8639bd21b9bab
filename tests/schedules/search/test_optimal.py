"""No plan is shorter than the bound, and the plan found is as short as the best of all orders."""

import sys
from random import Random

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules.all_orders import Stages, best_of_all_orders

from megatron.schedules.check import check
from megatron.schedules.costs import Costs, Time
from megatron.schedules.held import peak_held
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import COMM_KINDS
from megatron.schedules.passes import PASS_KINDS, Pass, PassKind
from megatron.schedules.plan import Plan, evaluation_plan
from megatron.schedules.search.automatic import one_by_one
from megatron.schedules.search.optimal import TOLERANCE, Optimum, optimal, span_of
from megatron.schedules.treatments import TREATMENTS


def line(p: int) -> Stages:
    return tuple((rank, 0) for rank in range(p))


def problem(p: int, m: int, split: bool = False, vocabulary: str = "none") -> Plan:
    """Return the plan of these passes that runs one microbatch after the other."""
    kinds: tuple[PassKind, ...] = ("F", "B", "W") if split else ("F", "B")
    any_order = tuple(Pass(kind, 0) for kind in kinds)
    return one_by_one(Plan((any_order,) * p, line(p), m, TREATMENTS[vocabulary]))


def name(plan: Plan) -> str:
    return f"p={plan.ranks} m={plan.microbatches} {plan.split_backward} {plan.treatment.name}"


def solve(plan: Plan, costs: Costs, limit: float, seconds: float = 60) -> Optimum:
    """Solve with one limit for all ranks, and hold the result to what it promises."""
    pytest.importorskip("ortools")
    found = optimal(plan, costs, limit, seconds=seconds)
    check(found.plan)
    for row in found.plan.rows:
        activations, exponentials, *_ = peak_held(found.plan, row)
        assert activations <= limit + 1e-6
        assert exponentials <= max(peak_held(plan, own).exponentials for own in plan.rows)
    assert found.time == span_of(found.plan, costs)
    assert found.bound <= found.time
    assert found.proven == (found.time - found.bound <= TOLERANCE * found.time)
    return found


def random_costs(seed: int, plan: Plan, parts: int = 1) -> Costs:
    """Return durations of 1/parts to 9/parts, of communications too."""
    random = Random(seed)
    shape = [[()] * plan.chunks] * plan.ranks
    passes: dict[PassKind, list[list[float]]] = {
        kind: [[random.randint(1, 9) / parts for _ in row] for row in shape]
        for kind in PASS_KINDS
        if kind not in ("R", "W") or Pass(kind, 0) in plan.rows[0]
    }
    return Costs(passes, {kind: random.randint(1, 9) / parts for kind in COMM_KINDS})


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("plan", "limit"),
    [
        (problem(1, 3, split=True), 2),
        (problem(2, 2, split=True), 1),
        (problem(2, 2, split=True), 2),
        (problem(2, 3), 2),
        (problem(1, 2, vocabulary="vocab-1"), 2),
        (problem(1, 2, vocabulary="vocab-2"), 1),
        (problem(3, 1, vocabulary="vocab-2"), 1),
        (problem(2, 1, vocabulary="naive"), 1),
    ],
    ids=lambda value: f"limit {value}" if isinstance(value, int) else name(value),
)
def test_the_optimum_is_the_best_of_all_orders(plan: Plan, limit: int, seed: int) -> None:
    costs = random_costs(seed, plan)
    found = solve(plan, costs, limit)
    assert found.proven
    assert found.time == best_of_all_orders(plan, costs, limit)


def test_the_bound_holds_where_durations_are_no_round_numbers() -> None:
    plan = problem(2, 2, split=True)
    costs = random_costs(5, plan, parts=7)
    found = solve(plan, costs, 2)
    best = best_of_all_orders(plan, costs, 2)
    assert found.bound <= best <= found.time
    assert found.proven


@settings(max_examples=examples(20))
@given(
    p=st.integers(1, 4), extra=st.integers(0, 4), seed=st.integers(0, 99), send=st.integers(0, 9)
)
def test_a_whole_backward_takes_as_long_as_1f1b(p: int, extra: int, seed: int, send: int) -> None:
    """The last rank starts p-1 stages late, and behind its last B are p-1 more."""
    random = Random(seed)
    forward, backward, m = random.randint(1, 9), random.randint(1, 9), p + extra
    costs = Costs({"F": forward, "B": backward}, {"X": send, "G": send})
    found = solve(make_plan("1f1b", "none", p, m, costs), costs, m)
    assert found.proven
    assert found.time == (m + p - 1) * (forward + backward) + 2 * (p - 1) * send


@pytest.mark.parametrize("p", [2, 3, 4, 6])
def test_zero_bubble_takes_as_long_as_published(p: int) -> None:
    """Memory p: a bubble of (p-1)(F+B-W); 2p-1: none (arXiv 2401.10241, table 2)."""
    m, costs = 2 * p, Costs({"F": 1, "B": 1, "W": 1})
    plan = problem(p, m, split=True)
    assert solve(plan, costs, p).time == 3 * m + p - 1
    found = solve(plan, costs, 2 * p - 1)
    assert found.time == 3 * m
    assert solve(found.plan, costs, 2 * p - 1).proven


@settings(max_examples=examples(15))
@given(
    p=st.integers(2, 3),
    m=st.integers(1, 3),
    split=st.booleans(),
    vocabulary=st.sampled_from(["none", "vocab-2", "vocab-1", "naive"]),
    seed=st.integers(0, 99),
)
def test_more_memory_never_hurts_and_what_is_found_is_a_plan(
    p: int, m: int, split: bool, vocabulary: str, seed: int
) -> None:
    random = Random(seed)
    kinds: tuple[PassKind, ...] = ("F", "B", "W", "S", "E", "T", "IF", "IB")
    times: dict[PassKind, float] = {kind: random.randint(0, 5) for kind in kinds}
    times["F"] += 1
    costs = Costs(times, {"X": 1, "G": 1, "C0": 1, "C1": random.randint(0, 5), "C2": 1, "CIB": 2})
    plan = problem(p, m, split, vocabulary)
    tight = solve(plan, costs, 1)
    loose = solve(tight.plan, costs, 2)
    assert tight.proven
    assert loose.proven
    assert loose.time <= tight.time


def test_without_time_the_plan_it_started_from_is_returned() -> None:
    costs = Costs({"F": 1, "B": 1, "W": 1})
    known = make_plan("zb-h1", "none", 4, 16, costs)
    found = solve(known, costs, 4, seconds=1e-6)
    assert found.plan == known
    assert found.time == span_of(known, costs)
    assert found.bound >= 3 * 16


def test_an_order_beyond_the_limits_is_not_used() -> None:
    costs = Costs({"F": 1, "B": 1, "W": 1})
    wide = make_plan("gpipe", "none", 2, 4, costs, split_backward=True)
    assert solve(wide, costs, 1).proven


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ValueError, match="pip install ortools"):
        optimal(problem(2, 2), Costs({"F": 1, "B": 1}), 2, seconds=1)


LINE = problem(2, 2)
COSTS = Costs({"F": 1, "B": 1, "S": 1, "T": 1, "IF": 0, "IB": 0})


@pytest.mark.parametrize(
    ("plan", "seconds", "message"),
    [(LINE, 0, "seconds=0"), (evaluation_plan(LINE), 1, "not for evaluation")],
)
def test_bad_input_is_refused(plan: Plan, seconds: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimal(plan, COSTS, 2, seconds=seconds)


@pytest.mark.parametrize(
    ("vocabulary", "forward", "lookup"), [("none", [0, 1], 1), ("vocab-2", 1, [0, 1])]
)
def test_spans_are_compared_only_where_every_order_begins_alike(
    vocabulary: str, forward: Time, lookup: Time
) -> None:
    costs = Costs({**COSTS.passes, "F": forward, "IF": lookup})
    with pytest.raises(ValueError, match="give F a time on every rank"):
        optimal(problem(2, 2, vocabulary=vocabulary), costs, 2, seconds=1)


@pytest.mark.full
def test_the_published_zb_1p_is_optimal() -> None:
    """Table 5 of arXiv 2401.10241, 1.5B, p = 8, m = 24: times in microseconds."""
    costs = Costs({"F": 18522, "B": 18086, "W": 9337}, {"X": 601, "G": 601})
    plan = problem(8, 24, split=True)
    found = solve(plan, costs, 8, seconds=900)
    assert found.proven
    assert 1 - (18522 + 18086 + 9337) * 24 / found.time == pytest.approx(0.1585, abs=5e-5)
