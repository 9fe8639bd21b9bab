"""No plan is shorter than the bound, and the plan found is as short as the best of all orders."""

import sys
from random import Random

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules.all_orders import Stages, best_of_all_orders

from megatron.schedules.check import check
from megatron.schedules.costs import Costs
from megatron.schedules.held import peak_held
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import COMM_KINDS
from megatron.schedules.passes import PASS_KINDS, Pass, PassKind
from megatron.schedules.plan import Plan, evaluation_plan
from megatron.schedules.search.automatic import one_by_one
from megatron.schedules.search.optimal import TOLERANCE, Objective, Optimum, duration, optimal
from megatron.schedules.treatments import TREATMENTS


def line(p: int) -> Stages:
    return tuple((rank, 0) for rank in range(p))


def vee(p: int) -> Stages:
    return (*line(p), *((rank, 1) for rank in reversed(range(p))))


def around(p: int) -> Stages:
    return (*line(p), *((rank, 1) for rank in range(p)))


def problem(stages: Stages, m: int, split: bool = False, vocabulary: str = "none") -> Plan:
    """Return the plan of these passes that runs one microbatch after the other."""
    ranks = range(1 + max(rank for rank, _ in stages))
    kinds: tuple[PassKind, ...] = ("F", "B", "W") if split else ("F", "B")
    any_order = tuple(
        tuple(Pass(kind, 0, chunk) for kind in kinds for rank, chunk in stages if rank == own)
        for own in ranks
    )
    return one_by_one(Plan(any_order, stages, m, TREATMENTS[vocabulary]))


def name(plan: Plan) -> str:
    stages = " ".join(f"{rank}.{chunk}" for rank, chunk in plan.stages)
    return f"{stages} m={plan.microbatches} split={plan.split_backward} {plan.treatment.name}"


def solve(
    plan: Plan,
    costs: Costs,
    limit: float,
    seconds: float = 60,
    objective: Objective = "span",
    hint: Plan | None = None,
    kept: float = 1.0,
) -> Optimum:
    """Solve with one limit for all ranks, and hold the result to what it promises."""
    pytest.importorskip("ortools")
    limits = [limit] * plan.ranks
    found = optimal(plan, costs, limits, seconds=seconds, objective=objective, hint=hint, kept=kept)
    check(found.plan)
    for row in found.plan.rows:
        activations, exponentials, *_ = peak_held(found.plan, row, kept)
        assert activations <= limit + 1e-6
        assert exponentials <= max(peak_held(plan, own).exponentials for own in plan.rows)
    assert found.time == duration(found.plan, costs, objective)
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
@pytest.mark.parametrize("objective", ["span", "makespan"])
@pytest.mark.parametrize(
    ("plan", "limit"),
    [
        (problem(line(1), 3, split=True), 2),
        (problem(line(2), 2, split=True), 1),
        (problem(line(2), 2, split=True), 2),
        (problem(line(2), 3), 2),
        (problem(vee(2), 2), 2),
        (problem(vee(2), 2), 3),
        (problem(around(2), 2), 3),
        (problem(line(1), 2, vocabulary="vocab-1"), 2),
        (problem(line(1), 2, vocabulary="vocab-2"), 1),
        (problem(line(3), 1, vocabulary="vocab-2"), 1),
        (problem(vee(2), 1, vocabulary="vocab-1"), 2),
        (problem(line(2), 1, vocabulary="naive"), 1),
    ],
    ids=lambda value: f"limit {value}" if isinstance(value, int) else name(value),
)
def test_the_optimum_is_the_best_of_all_orders(
    plan: Plan, limit: int, objective: Objective, seed: int
) -> None:
    costs = random_costs(seed, plan)
    found = solve(plan, costs, limit, objective=objective)
    assert found.proven
    assert found.time == best_of_all_orders(plan, costs, limit, objective)


def test_the_bound_holds_where_durations_are_no_round_numbers() -> None:
    plan = problem(vee(2), 2)
    costs = random_costs(5, plan, parts=7)
    found = solve(plan, costs, 3)
    best = best_of_all_orders(plan, costs, 3, "span")
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
    plan = problem(line(p), m, split=True)
    assert solve(plan, costs, p).time == 3 * m + p - 1
    found = solve(plan, costs, 2 * p - 1)
    assert found.time == 3 * m
    assert solve(found.plan, costs, 2 * p - 1).proven


@pytest.mark.parametrize("p", [2, 3])
def test_a_v_shape_has_no_bubble_with_half_the_memory(p: int) -> None:
    """Memory 2p of halves of a stage (arXiv 2401.10241, section 6); a bubble with less."""
    m, costs = 2 * p, Costs({"F": 0.5, "B": 0.5, "W": 0.5})
    plan = problem(vee(p), m, split=True)
    assert solve(plan, costs, 2 * p).time == 3 * m
    less = solve(plan, costs, p)
    assert less.proven
    assert less.time > 3 * m


@settings(max_examples=examples(15))
@given(
    stages=st.sampled_from([line(2), line(3), vee(2), around(2)]),
    m=st.integers(1, 3),
    split=st.booleans(),
    vocabulary=st.sampled_from(["none", "vocab-2", "vocab-1", "naive"]),
    kept=st.sampled_from([1.0, 0.4]),
    seed=st.integers(0, 99),
)
def test_more_memory_never_hurts_and_what_is_found_is_a_plan(
    stages: Stages, m: int, split: bool, vocabulary: str, kept: float, seed: int
) -> None:
    random = Random(seed)
    kinds: tuple[PassKind, ...] = ("F", "B", "W", "S", "E", "T", "IF", "IB")
    times: dict[PassKind, float] = {kind: random.randint(0, 5) for kind in kinds}
    times["F"] += 1
    costs = Costs(times, {"X": 1, "G": 1, "C0": 1, "C1": random.randint(0, 5), "C2": 1, "CIB": 2})
    plan = problem(stages, m, split, vocabulary)
    tight = solve(plan, costs, plan.chunks, kept=kept)
    loose = solve(plan, costs, plan.chunks + 1, kept=kept, hint=tight.plan)
    assert tight.proven
    assert loose.proven
    assert loose.time <= tight.time


def test_a_share_that_b_frees_is_room_for_another_microbatch() -> None:
    costs = Costs({"F": 1, "B": 1, "W": 1})
    pipeline = problem(line(2), 4, split=True)
    whole, half = (solve(pipeline, costs, 1.5, kept=kept).time for kept in (1.0, 0.5))
    assert half < whole


def test_without_time_the_plan_it_started_from_is_returned() -> None:
    costs = Costs({"F": 1, "B": 1, "W": 1})
    plan = problem(vee(4), 16, split=True)
    known = make_plan("zb-v", "none", 4, 16, costs)
    found = solve(plan, costs, 8, seconds=1e-6, hint=known)
    assert found.plan in (known, plan)
    assert found.time == min(duration(known, costs, "span"), duration(plan, costs, "span"))
    assert found.bound >= 3 * 16


def test_a_hint_beyond_the_limits_is_not_used() -> None:
    costs = Costs({"F": 1, "B": 1, "W": 1})
    wide = make_plan("gpipe", "none", 2, 4, costs, split_backward=True)
    narrow = problem(line(2), 4, split=True)
    assert solve(narrow, costs, 1, hint=wide).proven


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ValueError, match="pip install ortools"):
        optimal(problem(line(2), 2), Costs({"F": 1, "B": 1}), [2, 2], seconds=1)


LINE = problem(line(2), 2)
COSTS = Costs({"F": 1, "B": 1, "S": 1, "T": 1, "IF": 0, "IB": 0})


@pytest.mark.parametrize(
    ("plan", "limits", "seconds", "hint", "message"),
    [
        (LINE, [1], 1, None, "1 limits for 2 ranks"),
        (LINE, [1, 0], 1, None, "rank 1 may hold 0 activations .* needs 1"),
        (problem(vee(2), 2), [1, 2], 1, None, "rank 0 may hold 1 activations .* needs 2"),
        (LINE, [float("nan"), 1], 1, None, "rank 0 may hold nan"),
        (LINE, [1, 1], 0, None, "seconds=0"),
        (LINE, [1, 1], 1, problem(line(2), 3), "hint is a plan of other"),
        (
            LINE,
            [1, 1],
            1,
            problem(line(2), 2, split=True),
            "only one of hint and problem splits the backward",
        ),
        (evaluation_plan(LINE), [2, 2], 1, None, "not for evaluation"),
        (problem(((0, 0), (0, 1), (1, 0), (1, 1)), 2), [2, 2], 1, None, "objective makespan"),
    ],
)
def test_bad_input_is_refused(
    plan: Plan, limits: list[float], seconds: float, hint: Plan | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        optimal(plan, COSTS, limits, seconds=seconds, hint=hint)


@pytest.mark.full
def test_the_published_zb_1p_is_optimal() -> None:
    """Table 5 of arXiv 2401.10241, 1.5B, p = 8, m = 24: times in microseconds."""
    costs = Costs({"F": 18522, "B": 18086, "W": 9337}, {"X": 601, "G": 601})
    plan = problem(line(8), 24, split=True)
    found = solve(plan, costs, 8, seconds=900)
    assert found.proven
    assert 1 - (18522 + 18086 + 9337) * 24 / found.time == pytest.approx(0.1585, abs=5e-5)
