"""Pairs: what a plan with pairs promises, and what joining costs and saves."""

import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf
from random import Random
from typing import Any

import pytest
from harness.marks import full
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules.blocks.test_dualpipe_v import dualpipe_v_of_pytorch
from schedules.cases import (
    Case,
    cases,
    expected_passes,
    few_trials,
    random_costs,
    seeds,
    with_comms,
)
from schedules.paired import kinds_of_pairs, paired

from megatron.schedules import pairs
from megatron.schedules.buckets import with_reductions
from megatron.schedules.catalogue import SCHEDULES
from megatron.schedules.check import check
from megatron.schedules.costs import Costs
from megatron.schedules.held import in_flight, peak_held
from megatron.schedules.lower import Run, lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import Comm, needs, sources
from megatron.schedules.pair_steps import SWITCHES, PairSteps, Sends, Waits, Works
from megatron.schedules.pairs import joined
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan, evaluation_plan, plan_of_one, with_recomputation
from megatron.schedules.timing import earliest
from megatron.schedules.torch_csv import from_torch_csv, to_torch_csv
from megatron.schedules.turn_order import TurnOrder
from megatron.simulator.exchange import EvenBuckets, Overlap
from megatron.simulator.simulate import simulate

ALL = cases(passes=60, slices=st.sampled_from([1, 1, 2, 3]))
PLAIN = cases(vocabulary=st.just("none"), passes=40).map(lambda case: case._replace(ahead=None))


def waiting(case: Case, seed: int) -> Costs:
    """Return unequal costs of a case's passes, of which F and B wait a part, and W with luck."""
    random, costs = Random(seed), random_costs(seed, case.ranks, case.chunks)
    share = random.choice([0.0, 0.25, 0.5, 0.75])

    def part(kind: PassKind) -> list[list[float]]:
        return [
            [share * costs.time(kind, rank, chunk) for chunk in range(case.chunks)]
            for rank in range(case.ranks)
        ]

    waits: list[PassKind] = ["F", "B", "W"]
    wait = waits[: random.choice([2, 3])]
    often = {kind: random.randint(1, 6) for kind in waits[: random.choice([2, 3])]}
    return replace(costs, waits={kind: part(kind) for kind in wait}, journeys=often)


def ends_by_hand(plan: Plan, costs: Costs) -> dict[tuple[int, Pass], float]:
    """Return the end of every pass: rows are gone through until nothing changes any more."""
    ends: dict[tuple[int, Pass], float] = {}

    def arrives(rank: int, need: Pass | Comm) -> float | None:
        origins = [(rank, need)] if isinstance(need, Pass) else [*sources(plan, need)]
        if not all(origin in ends for origin in origins):
            return None
        taken = costs.of_comm(need, slices=plan.slices) if isinstance(need, Comm) else 0.0
        return max(ends[origin] for origin in origins) + taken

    rows = [list(plan.steps(rank)) for rank in range(plan.ranks)]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            free = 0.0
            for step in row:
                if (rank, step[0]) in ends:
                    free = ends[rank, step[0]]
                    continue
                times = [arrives(rank, need) for item in step for need in needs(plan, rank, item)]
                known = [time for time in times if time is not None]
                if len(known) < len(times):
                    break
                end = max([free, *known]) + taken_by_hand(plan, costs, rank, step)
                ends.update({(rank, item): end for item in step})
                free, moved = end, True
    return ends


def taken_by_hand(plan: Plan, costs: Costs, rank: int, step: tuple[Pass, ...]) -> float:
    """Two passes share a device and a link: no less than either is busy, nor either pass alone.

    That holds for as many pieces as both have; the pieces that one has more of run alone.
    """
    times = [costs.of_pass(plan, rank, item) for item in step]
    waits = [costs.waits_of(plan, rank, item) for item in step]
    if len(step) == 1:
        return times[0]
    pieces = [max(1, pieces_by_hand(plan, costs, item)) for item in step]
    time, wait = ([own / n for own, n in zip(each, pieces, strict=True)] for each in (times, waits))
    both = max(sum(time) - sum(wait), sum(wait), *time)
    rest = sum((n - min(pieces)) * own for n, own in zip(pieces, time, strict=True))
    return min(pieces) * both + rest


def pieces_by_hand(plan: Plan, costs: Costs, item: Pass) -> int:
    """How often a pass hands over; a whole backward also forms the gradients of W."""
    kinds: list[PassKind] = [item.kind]
    if item.kind == "B" and not plan.split_backward:
        kinds.append("W")
    times = [costs.journeys.get(kind, 2 if kind in costs.waits else 0) for kind in kinds]
    return sum(time for time in times if isinstance(time, int))


@settings(max_examples=examples(40))
@given(ALL, seeds, st.booleans())
def test_a_joined_plan_is_a_plan_that_is_no_longer_and_holds_no_more(
    case: Case, seed: int, joins_all: bool
) -> None:
    plan, costs = case.plan, with_comms(waiting(case, seed), seed)
    made = joined(plan, costs, joins_all=joins_all)
    check(made)
    assert joins_all or {*kinds_of_pairs(made)} <= {("F", "B")}
    for rank in range(plan.ranks):
        assert len(made.rows[rank]) == len(plan.rows[rank])
        assert {*made.rows[rank]} == expected_passes(plan, rank)
        now, before = (peak_held(each, each.rows[rank]) for each in (made, plan))
        assert all(a <= b for a, b in zip(now, before, strict=True))
    assert earliest(made, costs).end <= earliest(plan, costs).end * (1 + 1e-9)
    assert Plan.from_text(made.to_text()) == made
    assert joined(made, costs) == made


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "1f1b"])
def test_a_walk_that_ends_early_refuses_what_a_whole_one_refuses(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = Costs(
        {"F": 1, "B": 1.3, "W": 1, "S": 0.3, "T": 0.4, "IF": 0.01, "IB": 0.02},
        waits={"F": 0.25, "B": 0.4},
        journeys={"F": 8, "B": 8},
    )
    plan = make_plan(schedule, "vocab-2", 4, 24, costs, shortened=False)
    wanted = joined(plan, costs, joins_all=True)
    ended: list[bool] = []
    asked: Any = pairs._with_pairs

    def both(*words: Any) -> Any:
        *others, limit = words
        found, whole = asked(*words), asked(*others, inf)
        assert whole is not None
        ended.append(found is None)
        assert whole.end > limit if found is None else found == whole
        return whole

    monkeypatch.setattr(pairs, "_with_pairs", both)
    assert joined(plan, costs, joins_all=True) == wanted
    assert any(ended)
    assert not all(ended)


@settings(max_examples=examples(40))
@given(ALL, seeds, seeds)
def test_its_times_are_those_of_the_rule_of_two_resources(
    case: Case, seed: int, other: int
) -> None:
    made = paired(case.plan, seed, share=0.3)
    costs = with_comms(waiting(case, other), other)
    expected, timing = ends_by_hand(made, costs), earliest(made, costs)
    for rank, row in enumerate(made.rows):
        assert timing.ends[rank] == pytest.approx([expected[rank, item] for item in row])


@settings(max_examples=examples(40))
@given(ALL, seeds, seeds)
def test_its_program_runs_with_any_other_costs(case: Case, seed: int, other: int) -> None:
    made = paired(case.plan, seed, share=0.3)
    costs = with_comms(waiting(case, other), other)
    program = EvenBuckets(Overlap(reduce=True)).added_to(lower(made, costs))
    for rank, row in enumerate(program.rows):
        steps = [step.passes for step in row if isinstance(step, Run)]
        assert steps == [*made.steps(rank)]
    timeline = simulate(program, costs)
    for rank in range(made.ranks):
        spans = timeline.compute(rank)
        assert [span.label for span in spans] == [*map(str, made.rows[rank])]
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(spans))
        beside = {span.label for span in spans if span.leads}
        assert beside == {str(item) for at, item in made.pairs if at == rank}


@settings(max_examples=examples(30))
@given(PLAIN, seeds)
def test_pytorchs_form_has_pairs_of_f_and_b(case: Case, seed: int) -> None:
    made = paired(case.plan, seed, share=0.3)
    partners = [dict(pairwise(row)) for row in made.rows]
    kept = frozenset(
        (rank, item)
        for rank, item in made.pairs
        if (item.kind, partners[rank][item].kind) == ("F", "B")
    )
    text = to_torch_csv(made)
    assert text.count("OVERLAP_F_B") == len(kept)
    assert from_torch_csv(text) == replace(made, pairs=kept)


TWO = "microbatches 2\nstages 0.0 1.0\nvocabulary none\n"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0: F0 F1|B0 B1\n1: F0 B0|F1 B1\n", "line 5: 'B0|F1' is no pair: join F with B W"),
        ("0: F0 F1|B0|B1\n1: F0 F1 B0 B1\n", "line 4: 'F1|B0|B1' is no pair"),
        ("0: F0 F1 B0 B1\n1: F0|B0 F1 B1\n", "rank 1 cannot join F0 and B0: B waits for every F"),
        ("0: F0 F1|F2 B0 B1\n1: F0 F1 B0 B1\n", "line 4: 'F1|F2' is no pair"),
        (
            "0: F0 F1|B0 B1\n1: F0 F1|B0 B1\n",
            "rank 0 waits at F1|B0 for G0 from 1; rank 1 waits at F1|B0 for X1 from 0",
        ),
    ],
)
def test_pairs_that_cannot_run_are_refused(rows: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check(Plan.from_text(TWO + rows))


def test_a_pair_of_passes_that_are_no_neighbours_is_refused() -> None:
    plan = make_plan("1f1b", "none", 2, 3, shortened=False)
    with pytest.raises(ValueError, match="cannot join F0 with F1: in a pair, after F stands B or"):
        check(replace(plan, pairs=frozenset({(0, Pass("F", 0))})))
    with pytest.raises(ValueError, match="rank 0 joins F7, which it never runs"):
        check(replace(plan, pairs=frozenset({(0, Pass("F", 7))})))


def test_what_is_made_of_a_joined_plan() -> None:
    plan = Plan.from_text("microbatches 2\nstages 0.0\nvocabulary none\n0: F0 F1|B0 B1\n")
    assert with_recomputation(plan).row_text(0) == "F0 R0 F1|B0 R1 B1"
    assert plan_of_one(plan).row_text(0) == "F0 B0"
    assert evaluation_plan(plan).row_text(0) == "F0 F1"
    assert joined(evaluation_plan(plan)).pairs == frozenset()


SPLIT = "microbatches 3\nstages 0.0\nvocabulary none\n"
NO_PAIR = {
    "F0 F1 B0|W0 F2 B1 W1 B2 W2": "cannot join B0 and W0: a W waits for its B",
    "F0 F1 B0|W1 W0 B1 F2 B2 W2": "waits at B0|W1 for B1",
    "F0|W0 B0 F1 B1 W1 F2 B2 W2": "cannot join F0 and W0: W waits for every F of its own",
}


@pytest.mark.parametrize("row", NO_PAIR)
def test_a_pass_is_never_joined_with_one_that_needs_it(row: str) -> None:
    with pytest.raises(ValueError, match=re.escape(NO_PAIR[row])):
        check(Plan.from_text(f"{SPLIT}0: {row}\n"))


def test_passes_at_which_all_ranks_meet_run_alone() -> None:
    header = "microbatches 2\nstages 0.0\nvocabulary interlaced\n"
    rows = "0: IF0 IF1 F0 F1|S0 T0 S1 T1 B0 B1 IB0 IB1\n"
    with pytest.raises(ValueError, match="F1 and S0: all ranks meet at S and T of interlaced"):
        check(Plan.from_text(header + rows))


def test_two_chunks_of_one_microbatch_may_be_joined() -> None:
    row = "F0 F0.1 B0.1 B0|W0.1 W0"
    plan = Plan.from_text(f"microbatches 1\nstages 0.0 0.1\nvocabulary none\n0: {row}\n")
    check(plan)
    assert plan.row_text(0) == row


COLLECTIVES = Costs(
    {"F": 5.0, "B": 5.0, "W": 4.0},
    waits={"F": 1.0, "B": 1.0},
    journeys={"F": 4, "B": 4, "W": 4},
)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        # F and B hide each other's waits, so no wait is left for W.
        ("F0 F1 B0 W0 F2 B1 W1 B2 W2", "F0 F1|B0 W0 F2|B1 B2|W1 W2"),
        ("F0 F1 F2 B0 W0 B1 W1 B2 W2", "F0 F1 F2|B0 B1|W0 B2|W1 W2"),
        # Any pair would hold a second microbatch.
        ("F0 B0 W0 F1 B1 W1 F2 B2 W2", "F0 B0 W0 F1 B1 W1 F2 B2 W2"),
    ],
)
def test_an_older_w_hides_the_waits_of_b(row: str, expected: str) -> None:
    plan = Plan.from_text(f"{SPLIT}0: {row}\n")
    assert joined(plan, COLLECTIVES, joins_all=True).row_text(0) == expected


def test_a_pass_in_one_piece_hides_one_collective() -> None:
    plan = Plan.from_text(f"{SPLIT}0: F0 F1 B0 F2 B1|W0 W1 B2 W2\n")
    pair = Pass("B", 1), Pass("W", 0)
    # In four pieces W hides all waits of B; in one, the first of four.
    assert COLLECTIVES.of_pair(plan, 0, pair) == 5 + 4 - 1
    whole = replace(COLLECTIVES, journeys={"F": 4, "B": 4})
    assert whole.of_pair(plan, 0, pair) == 5 + 4 - 1 / 4


MEETING = (
    PairSteps((Works(4.0), Sends(3.0, "experts"), SWITCHES, Waits(0), Works(1.0))),
    PairSteps((Works(1.0), Sends(3.0, "experts"), SWITCHES, Waits(0), Works(4.0))),
)
"""An F and a B whose exchanges meet if F begins: 4, 1, 2 idle, 1, 2 idle, 4."""


def _same(steps: PairSteps) -> PairSteps:
    return steps


def test_a_program_has_the_turns_by_which_its_pairs_are_timed() -> None:
    """If B begins, its exchange runs beside the work of F, and the other way round: 1, 4, 4, 1."""
    plan = Plan.from_text(f"{SPLIT}0: F0 F1 F2|B0 B1|W0 B2|W1 W2\n")
    forward, backward = ([[partial(_same, own)]] for own in MEETING)
    costs = Costs(
        {"F": 8.0, "B": 8.0, "W": 1.0},
        waits={"F": 3.0, "B": 3.0},
        turns={"F": forward, "B": backward},
    )
    assert costs.of_pair(plan, 0, (Pass("F", 2), Pass("B", 0))) == 4 + 1 + 1 + 4
    row = [step for step in lower(plan, costs).rows[0] if isinstance(step, Run)]
    assert [step.turns for step in row] == [
        *(None, None, TurnOrder("B", (1, 1, 1, 1))),
        *(None, None, None),
    ]
    unknown = lower(plan, replace(costs, turns={})).rows[0]
    assert not any(step.turns for step in unknown if isinstance(step, Run))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("F0 B0 F1 W0 B1 W1 F2 B2 W2", "F0 F1|B0 W0 F2|B1 W1 B2 W2"),
        ("F0 F1 B0 F2 W0 B1 W1 B2 W2", "F0 F1|B0 W0 F2|B1 W1 B2 W2"),
    ],
)
def test_passes_between_the_two_make_way(row: str, expected: str) -> None:
    plan = Plan.from_text(f"microbatches 3\nstages 0.0\nvocabulary none\n0: {row}\n")
    made = joined(plan, Costs({"F": 2.0, "B": 2.0, "W": 1.0}, waits={"F": 1.0}))
    assert made.row_text(0) == expected


def test_a_bucket_is_reduced_after_the_pair_that_completes_it() -> None:
    plan = Plan.from_text(
        "microbatches 2\nstages 0.0 0.1\nvocabulary none\n0: F0 F0.1 F1 F1.1|B0.1 B0 B1.1 B1\n"
    )
    assert plan.pairs
    program = with_reductions(lower(plan), EvenBuckets(Overlap(reduce=True)).of(plan))
    names = [step.name if isinstance(step, Run) else str(step.comm) for step in program.rows[0]]
    assert names[3:7] == ["F1.1|B0.1", "B0", "B1.1", "RG 1 of 0"]


EXCHANGING = Costs(
    {"F": 1.5, "B": 1.5, "W": 1.0, "S": 0.25, "T": 0.25, "IF": 0.0, "IB": 0.0},
    waits={"F": 0.5, "B": 0.5},
)


@pytest.mark.parametrize(("vocabulary", "less"), [("none", 0.86), ("vocab-2", 0.9)])
@pytest.mark.parametrize(
    ("schedule", "more"),
    [
        ("1f1b", 3.0),
        full("zb-h1", 3.0),
        full("interleaved", 0.5),
        full("zb-v", 1.0),
        full("v-half", 2.5),
        full("hanayo", 0.5),
        full("dualpipe-v", 0.0),
    ],
)
def test_pairs_hide_the_exchange_for_the_named_memory(
    schedule: str, more: float, vocabulary: str, less: float
) -> None:
    """A microbatch more at most without a memory limit; with one, whatever the limit allows."""
    p, m = 3, 12

    def made(*, joined: bool, memory_limit: float | None = None) -> tuple[float, float]:
        with few_trials():
            plan = make_plan(
                schedule, vocabulary, p, m, EXCHANGING, joined=joined, memory_limit=memory_limit
            )
        return earliest(plan, EXCHANGING).end, max(in_flight(plan))

    (time, held), (own_time, own_held) = made(joined=False), made(joined=True)
    room = SCHEDULES[schedule].promise(p, m, SCHEDULES[schedule].chunks) + (vocabulary != "none")
    assert own_held <= max(held, room + 1)
    limit = room + more
    long, large = made(joined=True, memory_limit=limit)
    assert large <= limit
    assert long < less * time
    if more <= 1:
        assert own_time < less * time


def test_dualpipe_v_is_as_fast_as_zb_v_and_holds_less_with_pairs() -> None:
    p, m = 3, 12
    with few_trials():
        alone, others, pairs, their_pairs = (
            make_plan(schedule, "none", p, m, EXCHANGING, joined=joined)
            for joined in (False, True)
            for schedule in ("dualpipe-v", "zb-v")
        )
    assert earliest(alone, EXCHANGING).end <= 1.02 * earliest(others, EXCHANGING).end
    assert earliest(pairs, EXCHANGING).end <= earliest(their_pairs, EXCHANGING).end
    assert max(in_flight(pairs)) < max(in_flight(their_pairs))


@pytest.mark.parametrize("waits", [0.0, 0.25, 0.5])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 8), full(4, 16)])
def test_the_published_bubble_of_dualpipe_v(p: int, m: int, waits: float) -> None:
    """Idle time is at most (PP / 2 - 1) (F&B + B - 3 W), with PP = 2p stages and a whole B.

    The published order, as PyTorch has it, keeps to it under our times of pairs. The plan made here
    is as short.
    """
    costs = Costs({"F": 1.0, "B": 1.0, "W": 1.0}, waits={"F": waits, "B": waits})
    theirs = dualpipe_v_of_pytorch(p, m)
    timeline = simulate(lower(theirs, costs), costs)
    idle = max(timeline.end - timeline.work(rank) for rank in range(p))
    pair, whole = 3 - 2 * waits, 2
    assert idle <= (p - 1) * (pair + whole - 3) + 1e-9
    if waits == 0.5:
        assert idle == (p - 1) * (pair + whole - 3)
    mine = make_plan("dualpipe-v", "none", p, m, costs, joined=True)
    assert earliest(mine, costs).end <= earliest(theirs, costs).end + 1e-9


@pytest.mark.parametrize(
    ("schedule", "p", "m"), [("v-half", 3, 9), ("1f1b-v", 4, 8), ("v-min", 3, 9), ("zb-v", 3, 9)]
)
def test_a_plan_without_pairs_is_taken_where_it_is_shorter(schedule: str, p: int, m: int) -> None:
    """The search for pairs places passes without their waits, and may end with a longer plan."""
    passes: dict[PassKind, float] = {"F": 1.05, "B": 1.25, "W": 0.3, "S": 0.3, "T": 0.3}
    costs = Costs({**passes, "IF": 0.05, "IB": 0.05}, waits={"F": 0.25, "B": 0.25})
    alone, pairs = (
        make_plan(schedule, "vocab-2", p, m, costs, joined=joins) for joins in (False, True)
    )
    assert earliest(pairs, costs).end <= earliest(alone, costs).end
