"""What every schedule with every treatment of the vocabulary keeps, whatever the costs are.

How plans are lowered is checked in ``test_lower``, that times are right in ``test_timing``.
"""

from collections import defaultdict
from itertools import pairwise, product

import pytest
from harness.properties import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedules import by_hand
from schedules.cases import BARRIERS, NAMES, UNGROUPED, Case, cases, random_costs, seeds, with_comms

from megatron.schedules.block_options import BlockOptions
from megatron.schedules.blocks.with_slices import units_in_flight
from megatron.schedules.catalogue import SCHEDULES, TRAITS
from megatron.schedules.check import check
from megatron.schedules.costs import UNIT_COSTS
from megatron.schedules.held import in_flight, peak_held
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.plan import Plan
from megatron.simulator.simulate import Span, simulate

treatments = st.sampled_from([*BARRIERS])
ROUNDING = 1e-9
"""A third of a whole number is none."""
slices = st.sampled_from([1, 1, 2, 3, 4, 8])


def assert_sound(case: Case, seed: int) -> None:
    """Check all that a plan and its program promise."""
    plan = case.plan
    assert_every_pass_once(case)
    check(plan)
    assert_memory_promise(case)
    assert Plan.from_text(plan.to_text()) == plan
    costs = with_comms(random_costs(seed, case.ranks, case.chunks), seed)
    timeline = simulate(lower(plan, costs), costs)
    spans = [timeline.compute(rank) for rank in range(plan.ranks)]
    for row, least in zip(spans, by_hand.end_times(plan, costs), strict=True):
        assert all(span.end >= end - ROUNDING for span, end in zip(row, least, strict=True))
    if plan.treatment.is_sharded:
        assert_vocabulary_in_order(case, spans)


def assert_every_pass_once(case: Case) -> None:
    kinds = ["F", "B", *("W" * TRAITS[case.schedule].split), *("R" * (case.ahead is not None))]
    chunked = [by_hand.label(kind, 0, chunk) for kind in kinds for chunk in range(case.chunks)]
    expected = sorted(
        label.replace("0", str(i), 1) + (f"/{s}" if s else "")
        for label in [*chunked, *(f"{kind}0" for kind in case.treatment.passes)]
        for i in range(case.microbatches)
        for s in range(case.slices)
    )
    for row in case.plan.rows:
        assert sorted(map(str, row)) == expected


def assert_memory_promise(case: Case) -> None:
    """A rank holds what the schedule promises, and one microbatch more for every barrier.

    Where ranks meet for the output layer and the backward is whole, all passes of a rank keep to
    one interval, and microbatches live half as long again. Where microbatches are cut, slices take
    their place, and backwards wait for the last slice's forward.
    """
    assert all(peak_held(case.plan, r).recomputed <= (case.ahead or 0) for r in case.plan.rows)
    peak = max(in_flight(case.plan, TRAITS[case.schedule].kept))
    assert peak <= case.microbatches
    if case.memory_limit is not None:
        assert peak <= case.memory_limit
        return
    known, units = case.catalogued, case.microbatches * case.slices
    promise = known.promise(case.ranks, units, case.chunks)
    if case.vocabulary == "interlaced" and not known.split:
        promise = max(1.5 * promise + 1, promise + 2)
    else:
        promise += case.barriers
    block = known.block(case.ranks, units, case.chunks)
    assert case.slices * peak <= promise + units_in_flight(block, case.slices) + 1e-9


def assert_vocabulary_in_order(case: Case, rows: list[list[Span]]) -> None:
    """IF of all ranks before the first F, each barrier after all its passes and before its users.

    Read off a simulated run: what starts when, and what has ended by then.
    """
    starts: dict[tuple[str, by_hand.Unit], dict[int, float]] = defaultdict(dict)
    ends: dict[tuple[str, by_hand.Unit], list[float]] = defaultdict(list)
    for rank, row in enumerate(rows):
        for span in row:
            unit = by_hand.Unit(span.microbatch, span.slice)
            starts[by_hand.label(span.kind, 0, span.chunk), unit][rank] = span.start
            ends[span.kind, unit].append(span.end)
    (first, first_chunk), (last, last_chunk) = case.plan.stages[0], case.plan.stages[-1]
    chain = (*(barrier.after for barrier in case.treatment.barriers), "B")
    for i in map(by_hand.Unit._make, product(range(case.microbatches), range(case.slices))):
        assert starts[by_hand.label("F", 0, first_chunk), i][first] >= max(ends["IF", i])
        for merged, user in pairwise(chain):
            if user == "B":
                begins = [starts[by_hand.label("B", 0, last_chunk), i][last]]
            else:
                begins = [*starts[f"{user}0", i].values()]
            assert min(begins) >= max(ends[merged, i])
        if "T" not in chain:  # it waits for the last barrier as the backward does
            assert min(starts["T0", i].values()) >= max(ends[chain[-2], i])


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=examples(16))
@given(data=st.data(), seed=seeds)
def test_in_the_order_of_the_block(schedule: str, data: st.DataObject, seed: int) -> None:
    assert_sound(data.draw(cases([schedule], treatments, passes=200, slices=slices)), seed)


@pytest.mark.parametrize("schedule", NAMES)
@settings(max_examples=examples(10))
@given(data=st.data(), seed=seeds)
def test_shortened_by_unequal_costs(schedule: str, data: st.DataObject, seed: int) -> None:
    assert_sound(
        data.draw(cases([schedule], treatments, passes=32, shortened=True, slices=slices)), seed
    )


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), seed=seeds)
def test_large_ones_in_the_order_of_the_block(
    schedule: str, data: st.DataObject, seed: int
) -> None:
    assert_sound(data.draw(cases([schedule], treatments, passes=4096, slices=slices)), seed)


@pytest.mark.full
@pytest.mark.parametrize("schedule", NAMES)
@settings(max_examples=examples(10), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), seed=seeds)
def test_large_ones_shortened_by_unequal_costs(
    schedule: str, data: st.DataObject, seed: int
) -> None:
    assert_sound(
        data.draw(cases([schedule], treatments, passes=512, shortened=True, slices=slices)), seed
    )


def block_peak(schedule: str, vocabulary: str, ranks: int, chunks: int | None = None) -> float:
    """Return the most that a rank holds with as many microbatches as fill the pipeline."""
    plan = make_plan(schedule, vocabulary, ranks, 4 * ranks, chunks=chunks, shortened=False)
    return max(in_flight(plan))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7, 12])
def test_what_the_blocks_hold_is_what_the_papers_say(p: int) -> None:
    assert block_peak("gpipe", "none", p) == 4 * p
    for schedule in ("1f1b", "zb-h1", "zb-v"):
        assert block_peak(schedule, "none", p) == p
    assert block_peak("zb-h2", "none", p) == 2 * p - 1
    assert block_peak("v-half", "none", p) == (p + 2) // 2
    assert block_peak("v-min", "none", p) == (p + 4) // 3


@settings(max_examples=examples(30))
@given(st.integers(2, 16), st.integers(2, 4))
def test_what_interleaved_holds_is_what_megatrons_does(p: int, v: int) -> None:
    """A warm-up of (v - 1) p + 2 (p - 1) chunks on rank 0, and the one in hand."""
    assert block_peak("interleaved", "none", p, v) == ((v - 1) * p + 2 * (p - 1) + 1) / v


@settings(max_examples=examples(30))
@given(st.data(), st.integers(1, 8), st.integers(2, 4), st.integers(0, 40))
def test_what_larger_groups_cost(data: st.DataObject, p: int, v: int, more: int) -> None:
    """(v - 1) (g - p) chunks more, and no time, if the last group is no smaller than the pipeline.

    A smaller one idles as it does in groups of p: the first rank waits for the last one.
    """
    group, m = data.draw(st.integers(p, 3 * p)), p + more
    plan = make_plan(
        "interleaved", "none", p, m, chunks=v, options=BlockOptions.of(group=group), shortened=False
    )
    full = min(group, m)
    assert round(v * max(in_flight(plan))) <= min((v - 1) * full + 2 * (p - 1) + 1, v * m)
    if m >= group + p:
        assert round(v * max(in_flight(plan))) == (v - 1) * full + 2 * (p - 1) + 1
    if m % group == 0 or m % group >= p:
        assert by_hand.span(plan, UNIT_COSTS) == 3 * (v * m + p - 1)


@settings(max_examples=examples(30))
@given(
    st.sampled_from(UNGROUPED),
    st.sampled_from(["vocab-2", "vocab-1", "naive"]),
    st.integers(1, 12),
)
def test_each_barrier_holds_one_microbatch_more(schedule: str, vocabulary: str, p: int) -> None:
    without = make_plan(schedule, "none", p, 4 * p + 3, shortened=False)
    held = in_flight(make_plan(schedule, vocabulary, p, 4 * p + 3, shortened=False))
    assert held == [most + BARRIERS[vocabulary] for most in in_flight(without)]


@pytest.mark.parametrize("schedule", [name for name, known in SCHEDULES.items() if known.split])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 7, 12])
def test_interlaced_holds_no_more_where_all_passes_take_one_unit(schedule: str, p: int) -> None:
    """Whenever one ends all ranks are between two passes: they meet without changing the block."""
    assert block_peak(schedule, "interlaced", p) == block_peak(schedule, "none", p)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7, 12, 24])
def test_interlaced_1f1b_lives_half_as_long_again(p: int) -> None:
    """F to B of a microbatch takes 1.5 p intervals instead of p, as neighbours meet at one time."""
    assert block_peak("1f1b", "interlaced", p) in (1.5 * p - 0.5, 1.5 * p, 1.5 * p + 0.5)
