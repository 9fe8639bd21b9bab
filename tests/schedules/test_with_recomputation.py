"""R passes: where they go, what they need, and that nothing ends later because of them."""

from pathlib import Path

import pytest
from harness.properties import examples
from hypothesis import given, settings
from schedules.cases import Case, cases, few_trials, plans_of_blocks, random_costs, seeds

from megatron.schedules.catalogue import TRAITS
from megatron.schedules.check import check
from megatron.schedules.held import peak_held
from megatron.schedules.make_plan import least_time_of, make_plan
from megatron.schedules.needs import needs
from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan, evaluation_plan, with_recomputation
from megatron.schedules.request import Request
from megatron.schedules.timing import earliest
from megatron.simulator.costs.cost_file import parse_costs

TWO_RANKS = "microbatches 1\nstages 0.0 1.0\nvocabulary none\n0: F0 R0 B0 W0\n1: F0 R0 B0 W0\n"


@pytest.mark.parametrize(
    ("rank", "item", "expected"),
    [
        (0, "R0", ["F0"]),
        (1, "R0", ["F0"]),
        (0, "B0", ["R0", "G0 from 1"]),
        (1, "B0", ["R0"]),
        (0, "W0", ["B0"]),
    ],
)
def test_r_waits_for_no_gradient(rank: int, item: str, expected: list[str]) -> None:
    plan = Plan.from_text(TWO_RANKS)
    assert list(map(str, needs(plan, rank, Pass.parse(item)))) == expected


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("F0 B0 W0", "never runs R0"),
        ("R0 F0 B0 W0", "waits at R0 for F0"),
        ("F0 B0 R0 W0", "waits at B0 for R0"),
        ("F0 R0 R0 B0 W0", "runs R0 twice"),
    ],
)
def test_wrong_rows_are_refused(row: str, fault: str) -> None:
    text = TWO_RANKS.replace("1: F0 R0 B0 W0", f"1: {row}")
    with pytest.raises(ValueError, match=fault):
        check(Plan.from_text(text))


@settings(max_examples=examples(60))
@given(plans_of_blocks, seeds)
def test_no_pass_ends_later(plan: Plan, seed: int) -> None:
    costs = random_costs(seed, plan.ranks, plan.chunks)
    apart = with_recomputation(plan)
    check(apart)
    assert with_recomputation(apart) == apart
    assert evaluation_plan(apart) == evaluation_plan(plan)
    assert all(peak_held(apart, row).recomputed == 1 for row in apart.rows)
    before, after = earliest(plan, costs), earliest(apart, costs)
    for rank, row in enumerate(apart.rows):
        kept = [(p, end) for p, end in zip(row, after.ends[rank], strict=True) if p.kind != "R"]
        assert tuple(p for p, _ in kept) == plan.rows[rank]
        ends = zip(kept, before.ends[rank], strict=True)
        assert all(end <= old for (_, end), old in ends)


@settings(max_examples=examples(20))
@given(cases(shortened=True, passes=24))
def test_no_plan_beats_the_bound(case: Case) -> None:
    if case.schedule == "zb-auto":
        return
    request = Request(
        case.schedule, case.vocabulary, case.ranks, case.microbatches, case.costs,
        chunks=case.chunks if TRAITS[case.schedule].takes_chunks else None,
        recompute_ahead=case.ahead,
    )  # fmt: skip
    assert least_time_of(request) <= earliest(case.plan, case.costs).end + 1e-9


@pytest.mark.parametrize("vocabulary", ["none", "vocab-2"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v", "v-half"])
def test_in_idle_time_it_is_free(schedule: str, vocabulary: str) -> None:
    """Every schedule is shorter with R in front of B than with R in it, where ranks idle."""
    costs = parse_costs("F=1,R=1,B=1,W=1,S=0.25,T=0.25")
    with few_trials():
        plans = [make_plan(schedule, vocabulary, 4, 8, costs, recompute_ahead=n) for n in (None, 1)]
    ends = [earliest(plan, costs).end for plan in plans]
    assert ends[1] < ends[0]


def test_1f1b_saves_a_recomputation_for_every_rank_but_the_last() -> None:
    """On the way back, the gradient of the first microbatch meets ranks that are ready."""
    costs = parse_costs("F=1,R=1,B=2")
    for p, m in ((2, 4), (4, 8), (8, 16)):
        within, apart = (
            make_plan("1f1b", "none", p, m, costs, recompute_ahead=n) for n in (None, 1)
        )
        assert earliest(within, costs).end - earliest(apart, costs).end == p - 1


def test_a_plan_in_a_file_gets_the_passes_that_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "plan"
    plan = make_plan("zb-h1", "none", 2, 3)
    path.write_text(plan.to_text())
    found = make_plan("file", "none", 2, 3, file=path, recompute_ahead=1)
    assert found == with_recomputation(plan)
