"""Two timelines side by side: every share of idle time has its cause, and figures are by hand."""

import json
from collections.abc import Sequence
from dataclasses import astuple

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.schedules.costs import Costs
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import COMM_KINDS
from megatron.schedules.passes import PassKind
from megatron.simulator.compare import Bubble, Pair, bubble, compare, idle, overlap, total
from megatron.simulator.simulate import Span, Timeline, simulate

PASSES: dict[PassKind, float] = {
    "F": 1.0,
    "B": 1.5,
    "W": 0.5,
    "S": 0.4,
    "E": 0.1,
    "T": 0.3,
    "IF": 0.1,
    "IB": 0.2,
}


def simulated(schedule: str, vocabulary: str, p: int, m: int, comm: float) -> Timeline:
    costs = Costs(PASSES, dict.fromkeys(COMM_KINDS, comm))
    return simulate(lower(make_plan(schedule, vocabulary, p, m, costs), costs), costs)


cases = {
    "schedule": st.sampled_from(["1f1b", "interleaved", "zb-h1", "v-half"]),
    "vocabulary": st.sampled_from(["none", "naive", "vocab-1", "vocab-2", "interlaced"]),
    "p": st.integers(2, 5),
    "m": st.integers(1, 5),
    "comm": st.sampled_from([0.0, 0.3]),
}


@settings(max_examples=examples(25))
@given(**cases)
def test_a_simulated_rank_idles_for_others_only_and_all_idle_time_has_a_cause(
    schedule: str, vocabulary: str, p: int, m: int, comm: float
) -> None:
    timeline = simulated(schedule, vocabulary, p, m, comm)
    for rank in range(p):
        causes = bubble(timeline, rank)
        assert causes.host == pytest.approx(0, abs=1e-9)
        work = timeline.work(rank) / timeline.end
        assert sum(astuple(causes)) + work == pytest.approx(1)
        assert causes.barrier == 0 or vocabulary != "none"


@settings(max_examples=examples(10))
@given(**cases, factor=st.floats(0.5, 2.0))
def test_a_run_that_is_slower_throughout_has_that_ratio_everywhere(
    schedule: str, vocabulary: str, p: int, m: int, comm: float, factor: float
) -> None:
    planned = simulated(schedule, vocabulary, p, m, comm)
    slower = [
        span._replace(start=3 + factor * span.start, end=3 + factor * span.end)
        for span in (*planned.spans, *planned.waits)
    ]
    compared = compare(planned, Timeline.of_lanes(p, slower))
    assert compared.total.ratio == pytest.approx(factor)
    assert all(times.mean.ratio == pytest.approx(factor) for times in compared.passes.values())
    for planned_bubble, real_bubble in compared.bubbles:
        assert astuple(real_bubble) == pytest.approx(astuple(planned_bubble), abs=1e-9)
    assert all(pair.real == pytest.approx(pair.planned) for pair in compared.overlap.values())


def span(rank: int, label: str, start: float, end: float, lane: str = "compute") -> Span:
    kind = label.split()[0] if " " in label else label.rstrip("0123456789")
    return Span(rank, lane, label, kind, 0, 0, start, end)


def two_ranks(*others: Span, slow: float = 0.0) -> Timeline:
    """F on rank 0, then on rank 1, and B back; rank 1 may be slower."""
    passes = [
        span(0, "F0", 0, 1),
        span(1, "F0", 1, 3 + slow),
        span(1, "B0", 3 + slow, 5 + slow),
        span(0, "B0", 5 + slow, 8 + slow),
    ]
    return Timeline.of_lanes(2, [*passes, *others])


def test_causes_of_idle_time_by_hand() -> None:
    timeline = two_ranks(
        span(1, "X", 0, 1, "wait"),
        span(0, "G", 1, 2, "wait"),
        span(0, "C1", 2.5, 4, "wait"),
        span(0, "X", 7, 99, "wait"),
    )
    assert astuple(bubble(timeline, 0)) == pytest.approx((2 / 8, 1.5 / 8, 0, 0.5 / 8, 0))
    assert bubble(timeline, 1) == Bubble(peer=1 / 8, barrier=0, replicas=0, host=0, done=3 / 8)
    for rank in range(2):
        assert sum(astuple(bubble(timeline, rank))) == pytest.approx(1 - timeline.work(rank) / 8)


def test_waits_for_replicas_are_part_of_the_iteration() -> None:
    """In front of the first pass that reads a bucket, and behind the last one of the row."""
    timeline = two_ranks(span(1, "AG", 0.5, 1, "wait"), span(0, "RG", 8, 10, "wait"))
    assert total(timeline) == 10
    assert bubble(timeline, 0) == Bubble(0, 0, replicas=2 / 10, host=4 / 10, done=0)
    assert bubble(timeline, 1) == Bubble(0, 0, replicas=0.5 / 10, host=0.5 / 10, done=5 / 10)
    assert idle(timeline) == pytest.approx(1 - (4 + 4) / (2 * 10))


def overlap_of(*spans: Span) -> dict[str, float]:
    return overlap(two_ranks(*spans))


def test_overlap_by_hand() -> None:
    """From 2 on both ranks are there; rank 0 idles till 5, rank 1 works till 5."""
    ranks = [span(0, "C1 0", 0.5, 6, "comm"), span(1, "C1 0", 2, 6, "comm")]
    assert overlap_of(*ranks) == pytest.approx({"C1": (1 + 3) / 8})
    assert overlap_of(span(0, "X 0", 0, 1, "comm")) == {}
    assert overlap_of(span(0, "C0 0", 1, 1, "comm")) == {}


def test_a_slow_rank_shows() -> None:
    compared = compare(two_ranks(), two_ranks(slow=1.0))
    assert compared.total == Pair(8, 9)
    forward = compared.passes["F"]
    assert forward.mean == Pair(1.5, 2.0)
    assert forward.by_rank == {0: Pair(1, 1), 1: Pair(2, 3)}
    assert forward.by_rank[1].ratio == 1.5
    assert compared.idle == pytest.approx(Pair(0.5, 0.5))


def test_it_can_be_printed_as_json_where_a_ratio_is_infinite() -> None:
    free = two_ranks()
    free = Timeline(2, tuple(s._replace(end=s.start) if s.rank else s for s in free.spans))
    document = json.loads(json.dumps(compare(free, two_ranks()).as_json(), allow_nan=False))
    assert document["passes"]["F"]["by_rank"]["1"] == {"planned": 0, "real": 2, "ratio": None}


@pytest.mark.parametrize(
    ("spans", "ranks", "message"),
    [
        ([], 3, "2 ranks and the run 3"),
        ([], 2, "B0 of rank 0 is only planned"),
        ([*two_ranks().spans, span(1, "W0", 8, 9)], 2, "W0 of rank 1 is only run"),
    ],
)
def test_timelines_of_different_plans_are_refused(
    spans: Sequence[Span], ranks: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compare(two_ranks(), Timeline(ranks, tuple(spans)))


def test_a_rank_without_passes_is_refused() -> None:
    alone = Timeline(2, (span(0, "F0", 0, 1),))
    with pytest.raises(ValueError, match="rank 1 has no passes"):
        compare(alone, alone)
