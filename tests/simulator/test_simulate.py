"""The simulator against times computed by hand, on programs small enough for that."""

from itertools import pairwise

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.schedules.costs import UNIT_COSTS, Costs
from megatron.schedules.lower import Instruction, Program, Run, Start, Wait, lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import COMM_KINDS, Comm, CommKind
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan
from megatron.simulator.simulate import Span, Timeline, simulate

F0, F1, F2 = (Run(Pass("F", i)) for i in range(3))
X0, X1 = (Comm("X", i) for i in range(2))
Row = list[Instruction]
schedules = st.sampled_from(["1f1b", "interleaved", "v-half"])
treatments = st.sampled_from(["none", "vocab-2", "vocab-1", "naive", "interlaced"])


def two_ranks(microbatches: int, *rows: Row) -> Program:
    """Return a program as written; its plan only says who is who."""
    return Program(
        Plan(((), ()), ((0, 0), (1, 0)), microbatches), tuple(tuple(row) for row in rows)
    )


def when(timeline: Timeline, rank: int, lane: str = "compute") -> dict[str, tuple[float, float]]:
    """Return start and end of everything in a rank's lane."""
    return {
        span.label: (span.start, span.end)
        for span in timeline.spans
        if (span.rank, span.lane) == (rank, lane)
    }


def test_a_message_delays_by_what_it_takes() -> None:
    program = lower(make_plan("1f1b", "none", 2, 1))
    timeline = simulate(program, Costs({"F": 1, "B": 2}, {"X": 0.5, "G": 0.25}))
    assert when(timeline, 0) == {"F0": (0, 1), "B0": (4.75, 6.75)}
    assert when(timeline, 1) == {"F0": (1.5, 2.5), "B0": (2.5, 4.5)}
    for rank in (0, 1):
        assert when(timeline, rank, "comm") == {"X0 from 0": (1, 1.5), "G0 from 1": (4.5, 4.75)}
    assert timeline.end == 6.75


def test_the_collectives_of_one_microbatch_in_a_row() -> None:
    """vocab-1 on two ranks: CIF, F, X, F, C0, S, C1, T, C2, B, G, B, CIB; nothing overlaps."""
    program = lower(make_plan("1f1b", "vocab-1", 2, 1))
    passes: dict[PassKind, float] = {"IF": 1.0, "F": 2.0, "S": 3.0, "T": 4.0, "B": 5.0, "IB": 6.0}
    order: tuple[CommKind, ...] = ("CIF", "X", "C0", "C1", "C2", "G", "CIB")
    comms = {kind: 10.0 * (1 + i) for i, kind in enumerate(order)}
    timeline = simulate(program, Costs(passes, comms))
    # fmt: off
    assert when(timeline, 0) == {
        "IF0": (0, 1), "F0": (11, 13), "S0": (65, 68), "T0": (108, 112), "B0": (227, 232),
        "IB0": (232, 238),
    }
    assert when(timeline, 1) == {
        "IF0": (0, 1), "F0": (33, 35), "S0": (35, 38), "T0": (108, 112), "B0": (162, 167),
        "IB0": (302, 308),
    }
    assert when(timeline, 1, "comm") == {
        "CIF 0": (1, 11), "X0 from 0": (13, 33), "C0 0": (35, 65), "C1 0": (68, 108),
        "C2 0": (112, 162), "G0 from 1": (167, 227), "CIB 0": (232, 302),
    }
    # fmt: on


def test_communication_overlaps_with_computation_until_it_is_waited_for() -> None:
    sender: Row = [F0, Start(X0), F1, F2, Wait(X0)]
    receiver: Row = [Start(X0), F1, Wait(X0), F0]
    timeline = simulate(two_ranks(3, sender, receiver), Costs({"F": 2}, {"X": 3}))
    assert when(timeline, 0) == {"F0": (0, 2), "F1": (2, 4), "F2": (4, 6)}
    assert when(timeline, 1) == {"F1": (0, 2), "F0": (5, 7)}
    assert when(timeline, 0, "comm") == {"X0 from 0": (2, 5)}


def test_a_communication_begins_when_the_last_participant_issues_it() -> None:
    sender: Row = [F0, Start(X0), Wait(X0), F1]
    receiver: Row = [F1, F2, Start(X0), Wait(X0), F0]
    timeline = simulate(two_ranks(3, sender, receiver), Costs({"F": [1, 4]}, {"X": 1}))
    assert when(timeline, 1, "comm") == {"X0 from 0": (8, 9)}
    assert when(timeline, 0)["F1"] == (9, 10)
    assert when(timeline, 1)["F0"] == (9, 13)


def test_communications_of_one_lane_run_one_after_another() -> None:
    sender: Row = [F0, Start(X0), F1, Start(X1), Wait(X0), Wait(X1)]
    receiver: Row = [Start(X0), Start(X1), Wait(X0), F0, Wait(X1), F1]
    timeline = simulate(two_ranks(2, sender, receiver), Costs({"F": 1}, {"X": 3}))
    assert when(timeline, 0, "comm") == {"X0 from 0": (1, 4), "X1 from 0": (4, 7)}
    assert when(timeline, 1) == {"F0": (4, 5), "F1": (7, 8)}


def test_both_directions_of_a_link_and_the_collectives_are_lanes_of_their_own() -> None:
    comms = [Comm("X", 0), Comm("G", 0, 1), Comm("C1", 0)]
    row: Row = [*map(Start, comms), *map(Wait, comms), F0]
    timeline = simulate(two_ranks(1, row, row), Costs({"F": 1}, {"X": 3, "G": 3, "C1": 3}))
    assert set(when(timeline, 0, "comm").values()) == {(0, 3)}
    collectives = [Comm("C1", 0), Comm("CIF", 1), Comm("C2", 0)]
    row = [*map(Start, collectives), *map(Wait, collectives), F0]
    costs = Costs({"F": 1}, {"C1": 3, "C2": 1, "CIF": 2})
    assert when(simulate(two_ranks(2, row, row), costs), 1, "comm") == {
        "C1 0": (0, 3), "CIF 1": (3, 5), "C2 0": (5, 6)
    }  # fmt: skip


def test_free_communication_leaves_no_span() -> None:
    timeline = simulate(lower(make_plan("1f1b", "vocab-2", 3, 4)))
    assert {span.lane for span in timeline.spans} == {"compute"}


@settings(max_examples=examples(40))
@given(
    schedules,
    treatments,
    st.integers(1, 6),
    st.integers(1, 12),
    st.lists(st.integers(0, 5), min_size=len(COMM_KINDS), max_size=len(COMM_KINDS)),
)
def test_nothing_overlaps_that_cannot(
    schedule: str, vocabulary: str, ranks: int, microbatches: int, times: list[int]
) -> None:
    """A rank runs one pass at a time, a link and the collectives carry one message at a time."""
    program = lower(make_plan(schedule, vocabulary, ranks, microbatches, shortened=False))
    costs = Costs(UNIT_COSTS.passes, dict(zip(COMM_KINDS, map(float, times), strict=True)))
    timeline = simulate(program, costs)
    lanes: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for span in timeline.spans:
        link = f"{span.kind} {span.label.split()[-1]}" if span.kind in ("X", "G") else "collective"
        lane = "compute" if span.lane == "compute" else link
        lanes.setdefault((span.rank, lane), []).append((span.start, span.end))
    for taken in lanes.values():
        taken.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(taken))


@settings(max_examples=examples(40))
@given(
    schedules,
    treatments,
    st.integers(1, 6),
    st.integers(1, 12),
    st.sampled_from(COMM_KINDS),
)
def test_slower_communication_never_ends_sooner(
    schedule: str, vocabulary: str, ranks: int, microbatches: int, kind: CommKind
) -> None:
    program = lower(make_plan(schedule, vocabulary, ranks, microbatches, shortened=False))
    ends = [
        simulate(program, Costs(UNIT_COSTS.passes, {kind: time})).end
        for time in (0.0, 0.5, 1.0, 4.0)
    ]
    assert ends == sorted(ends)


def test_bubble_rate_by_hand() -> None:
    """Rank 0 works 2 from 0 to 3, rank 1 works 4 from 1 to 6: the longer span is 5, the end 6."""
    spans = ((0, 0, 1), (0, 2, 3), (1, 1, 4), (1, 5, 6))
    timeline = Timeline(
        2, tuple(Span(at, "compute", "F0", "F", 0, 0, start, end) for at, start, end in spans)
    )
    assert (timeline.work(0), timeline.work(1), timeline.end) == (2, 4, 6)
    assert timeline.bubble_rate() == pytest.approx(1 - 6 / (2 * 5))
    assert timeline.idle() == pytest.approx(1 - 6 / (2 * 6))


@settings(max_examples=examples(30))
@given(st.integers(1, 10), st.integers(1, 30))
def test_bubble_of_1f1b(ranks: int, microbatches: int) -> None:
    """(p - 1) / (m + p - 1) of the time (arXiv 2104.04473, section 2.2.1, there as a ratio)."""
    timeline = simulate(lower(make_plan("1f1b", "none", ranks, microbatches)))
    bubble = (ranks - 1) / (microbatches + ranks - 1)
    assert timeline.end == 3 * (microbatches + ranks - 1)
    assert timeline.bubble_rate() == pytest.approx(bubble)
    assert timeline.idle() == pytest.approx(bubble)


def test_communication_is_no_work() -> None:
    spans = (
        Span(0, "compute", "F0", "F", 0, 0, 0, 2),
        Span(0, "comm", "X0 from 0", "X", 0, 0, 2, 4),
    )
    timeline = Timeline(1, spans)
    assert timeline.compute(0) == [spans[0]]
    assert timeline.end == 4
    assert timeline.bubble_rate() == 0
    assert timeline.idle() == 0.5


def test_a_cost_may_differ_by_rank() -> None:
    program = lower(make_plan("1f1b", "none", 2, 1))
    timeline = simulate(program, Costs({"F": [1, 10], "B": (100, 20)}))
    assert when(timeline, 0) == {"F0": (0, 1), "B0": (31, 131)}
    assert when(timeline, 1) == {"F0": (1, 11), "B0": (11, 31)}


def test_a_pass_without_a_cost_is_named() -> None:
    program = lower(make_plan("1f1b", "vocab-2", 2, 1))
    with pytest.raises(ValueError, match="no cost is given for IF passes: give IF=TIME"):
        simulate(program, Costs({"F": 1, "B": 2}))


def test_a_program_that_waits_in_a_circle_is_refused() -> None:
    one: Row = [Start(X0), Wait(X0), Start(Comm("G", 0, 1)), Wait(Comm("G", 0, 1)), F0]
    other: Row = [Start(Comm("G", 0, 1)), Wait(Comm("G", 0, 1)), Start(X0), Wait(X0), F0]
    with pytest.raises(ValueError, match="the program deadlocks"):
        simulate(two_ranks(1, one, other))


def test_a_timeline_without_spans_ends_at_zero() -> None:
    assert Timeline(1, ()).end == 0
