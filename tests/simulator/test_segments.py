"""Segments of passes that exchange tokens: together they are the simulated times, in turns."""

from dataclasses import replace
from itertools import pairwise

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.schedules.costs import Costs
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.pairs import joined
from megatron.schedules.plan import Plan
from megatron.simulator.segments import with_segments
from megatron.simulator.simulate import Span, Timeline, simulate

EXCHANGED = Costs(
    {"F": 3.0, "B": 4.0, "W": 1.0}, waits={"F": 1.0, "B": 2.5}, journeys={"F": 2, "B": 4}
)


PLAN = joined(
    make_plan("dualpipe-v", "none", 2, 5, EXCHANGED.without_waits(), shortened=False), EXCHANGED
)


def simulated(costs: Costs) -> tuple[Plan, Timeline]:
    assert PLAN.pairs
    return PLAN, simulate(lower(PLAN, costs), costs)


def of(timeline: Timeline, span: Span, lane: str) -> list[Span]:
    same = (own for own in timeline.segments if (own.rank, own.label) == (span.rank, span.label))
    return sorted((own for own in same if own.lane == lane), key=lambda own: own.start)


shares = st.floats(0.125, 0.9375)


@settings(max_examples=examples(25))
@given(waits_f=shares, waits_b=shares, journeys=st.integers(1, 6))
def test_segments_add_up_to_their_pass(waits_f: float, waits_b: float, journeys: int) -> None:
    times = {"F": 3.0, "B": 4.0}
    waits = {"F": 3.0 * waits_f, "B": 4.0 * waits_b}
    costs = Costs(
        {"W": 1.0, "F": times["F"], "B": times["B"]},
        waits={"F": waits["F"], "B": waits["B"]},
        journeys={"F": journeys, "B": journeys},
    )
    plan, timeline = simulated(costs)
    timeline = with_segments(timeline, plan, costs)
    for span in timeline.spans:
        if span.kind not in times or span.lane != "compute":
            continue
        tokens, work = of(timeline, span, "tokens"), of(timeline, span, "work")
        assert len(tokens) == journeys
        assert sum(own.length for own in tokens) == pytest.approx(waits[span.kind])
        assert all(one.end <= other.start + 1e-9 for one, other in pairwise(tokens))
        assert len(work) == (journeys if span.beside else 0), "a pass alone is drawn whole"
        if work:
            worked = times[span.kind] - waits[span.kind]
            assert sum(own.length for own in work) == pytest.approx(worked)


def test_the_passes_of_a_pair_take_turns_until_the_pair_ends() -> None:
    plan, timeline = simulated(EXCHANGED)
    timeline = with_segments(timeline, plan, EXCHANGED)
    forwards = [span for span in timeline.spans if span.beside and span.kind == "F"]
    for forward in forwards:
        [backward] = [
            span for span in timeline.spans
            if (span.rank, span.label) == (forward.rank, forward.beside)
        ]  # fmt: skip
        own, other = (of(timeline, span, "work") for span in (forward, backward))
        assert (len(own), len(other)) == (2, 4), "the B goes on alone after two rounds"
        turns = [turn for round_ in zip(own, other[:2], strict=True) for turn in round_]
        turns += other[2:]
        assert turns[0].start == forward.start
        assert all(one.end <= next_.start + 1e-9 for one, next_ in pairwise(turns))
        travels = of(timeline, forward, "tokens"), of(timeline, backward, "tokens")
        ends = max(own.end for own in (turns[-1], *travels[0], *travels[1]))
        assert ends == pytest.approx(backward.end)
        for tokens, beside in zip(travels, (other[:2], own), strict=True):
            begun = [t.start for t in tokens[: len(beside)]]
            assert begun == pytest.approx([w.start for w in beside])


def test_a_pass_alone_works_before_the_exchanges_of_f_and_after_those_of_b() -> None:
    plan, timeline = simulated(EXCHANGED)
    timeline = with_segments(timeline, plan, EXCHANGED)
    alone = [s for s in timeline.spans if s.lane == "compute" and not s.beside]
    for kind, first, last in (("F", 1.0, 3.0), ("B", 0.0, 3.625)):
        span = next(span for span in alone if span.kind == kind)
        tokens = of(timeline, span, "tokens")
        assert tokens[0].start - span.start == pytest.approx(first)
        assert tokens[-1].end - span.start == pytest.approx(last)


def test_segments_of_slowed_passes_are_as_much_longer() -> None:
    plan, timeline = simulated(EXCHANGED)
    slowed = tuple(s._replace(start=2 * s.start, end=2 * s.end) for s in timeline.spans)
    usual = with_segments(timeline, plan, EXCHANGED).segments
    longer = with_segments(replace(timeline, spans=slowed), plan, EXCHANGED).segments
    assert [s.end for s in longer] == pytest.approx([2 * s.end for s in usual])


def test_without_exchanges_there_are_no_segments() -> None:
    costs = replace(EXCHANGED, waits={})
    plan = make_plan("1f1b", "none", 2, 4, costs)
    timeline = simulate(lower(plan, costs), costs)
    assert with_segments(timeline, plan, costs) == timeline
