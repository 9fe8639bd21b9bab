"""Costs read off a timeline are those that it was simulated with; waiting is no cost."""

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.schedules.costs import UNIT_COSTS, Costs, Exchange, Time
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import COMM_KINDS, Comm, CommKind
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan
from megatron.simulator.costs.from_timelines import as_all_joined, costs_from_timelines
from megatron.simulator.exchange import EvenBuckets, Overlap
from megatron.simulator.simulate import Span, Timeline, simulate

times = st.floats(0.1, 3.0)


def drawn_costs(data: st.DataObject, p: int, chunks: int, comms: bool) -> Costs:
    table = st.lists(st.lists(times, min_size=chunks, max_size=chunks), min_size=p, max_size=p)
    row = st.lists(times, min_size=p, max_size=p)
    by_chunk: tuple[PassKind, ...] = ("F", "B", "W")
    by_rank: tuple[PassKind, ...] = ("S", "E", "T", "IF", "IB")
    passes: dict[PassKind, Time] = {kind: data.draw(table) for kind in by_chunk}
    passes |= {kind: data.draw(row) for kind in by_rank}
    return Costs(passes, {kind: data.draw(times) for kind in COMM_KINDS} if comms else {})


def check_passes(plan: Plan, found: Costs, wanted: Costs) -> None:
    for rank, row in enumerate(plan.rows):
        for item in row:
            expected = wanted.of_pass(plan, rank, item)
            assert found.of_pass(plan, rank, item) == pytest.approx(expected)


@settings(max_examples=examples(25))
@given(
    data=st.data(),
    schedule=st.sampled_from(["1f1b", "zb-h1", "v-half", "interleaved"]),
    vocabulary=st.sampled_from(["none", "naive", "vocab-1", "vocab-2", "interlaced"]),
    p=st.integers(2, 4),
    m=st.integers(1, 4),
    comms=st.booleans(),
)
def test_passes_and_collectives_cost_what_they_were_simulated_with(
    data: st.DataObject, schedule: str, vocabulary: str, p: int, m: int, comms: bool
) -> None:
    costs = drawn_costs(data, p, 2 if schedule in ("v-half", "interleaved") else 1, comms)
    plan = make_plan(schedule, vocabulary, p, m, costs)
    timelines = [simulate(lower(plan, costs), costs)] * 2
    found = costs_from_timelines(plan, timelines)
    check_passes(plan, found, costs)
    for kind, seconds in found.comms.items():
        if kind not in ("X", "G"):
            assert seconds == pytest.approx(costs.of_comm(Comm(kind, 0)))


def test_a_transfer_that_is_waited_for_costs_what_it_takes_from_its_pass_on() -> None:
    costs = Costs({"F": 1.0, "B": 2.0}, {"X": 0.25, "G": 0.5})
    plan = make_plan("1f1b", "none", 3, 6, costs)
    found = costs_from_timelines(plan, [simulate(lower(plan, costs), costs)])
    assert found.comms == pytest.approx({"X": 0.25, "G": 0.5})


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "v-half"])
@pytest.mark.parametrize("vocabulary", ["none", "vocab-2"])
def test_every_slice_has_its_own_costs(schedule: str, vocabulary: str) -> None:
    chunks = 2 if schedule == "v-half" else 1

    def of(factor: float) -> Costs:
        passes: dict[PassKind, Time] = {
            kind: [[factor * (1 + rank + chunk) for chunk in range(chunks)] for rank in range(2)]
            for kind in ("F", "B", "W")
        }
        passes |= dict.fromkeys(("S", "T", "IF", "IB"), [0.2 * factor] * 2)
        return Costs(passes, {"C0": 0.1 * factor, "C1": 0.1 * factor})

    costs = Costs({**of(6.0).passes, "U": 1.0}, of(6.0).comms, slices=[of(1.0), of(2.0), of(3.0)])
    plan = make_plan(schedule, vocabulary, 2, 4, costs, slices=3)
    timelines = [simulate(lower(plan, costs), costs)] * 2
    found = costs_from_timelines(plan, timelines)
    check_passes(plan, found, costs)
    for rank in range(2):
        assert found.time("F", rank, 0) == pytest.approx(costs.time("F", rank, 0))
    for number, own in enumerate(found.slices):
        assert own.comms == pytest.approx(
            {kind: costs.slices[number].comms.get(kind, 0.0) for kind in own.comms}
        )
    again = simulate(lower(plan, found), found)
    assert again.end == pytest.approx(timelines[0].end)


def two_ranks() -> Plan:
    return make_plan("1f1b", "vocab-2", 2, 1)


def recorded(plan: Plan, collectives: dict[str, list[tuple[float, float]]]) -> Timeline:
    """Return a timeline of one-second passes, with the given collectives by rank."""
    spans = []
    for rank, row in enumerate(plan.rows):
        for at, item in enumerate(row):
            kind, microbatch, chunk, _ = item
            spans.append(Span(rank, "compute", str(item), kind, microbatch, chunk, at, at + 1.0))
    for label, of_ranks in collectives.items():
        for rank, (start, end) in enumerate(of_ranks):
            spans.append(Span(rank, "comm", label, label.split()[0], 0, 0, start, end))
    return Timeline(plan.ranks, tuple(spans))


def test_a_collective_is_charged_from_when_the_last_rank_has_come() -> None:
    plan = two_ranks()
    timeline = recorded(plan, {"C1 0": [(1.0, 9.5), (9.0, 9.4)], "C0 0": [(0.0, 0.1), (5.0, 5.2)]})
    comms = costs_from_timelines(plan, [timeline]).comms
    assert comms == pytest.approx({"C1": 0.5, "C0": 0.2})


def test_the_median_is_taken_over_iterations() -> None:
    plan = two_ranks()
    slow = recorded(plan, {})
    slow = Timeline(2, tuple(s._replace(end=s.end + 100) for s in slow.spans))
    costs = costs_from_timelines(plan, [recorded(plan, {}), slow, recorded(plan, {})])
    assert costs.of_pass(plan, 1, Pass("F", 0)) == 1.0
    assert "W" not in costs.passes


def test_passes_that_take_turns_count_in_the_mean_and_disturbed_iterations_not() -> None:
    plan = make_plan("1f1b", "vocab-2", 2, 4)

    def iteration(disturbed: float) -> Timeline:
        spans = []
        for rank, row in enumerate(plan.rows):
            for item in row:
                seconds = disturbed * (1.9 if item.kind == "T" and item.microbatch % 2 else 0.1)
                spans.append(Span(rank, "compute", str(item), *item[:3], 0.0, seconds))
        return Timeline(plan.ranks, tuple(spans))

    found = costs_from_timelines(plan, [iteration(1.0), iteration(7.0), iteration(1.0)])
    assert found.of_pass(plan, 1, Pass("T", 0)) == pytest.approx(1.0)
    assert found.of_pass(plan, 0, Pass("F", 0)) == pytest.approx(0.1)


def test_a_slow_replica_is_no_slow_link() -> None:
    def replica(late: float) -> Timeline:
        passes = Span(0, "compute", "B0", "B", 0, 0, 0.0, 2.0 + late)
        return Timeline(1, (passes, Span(0, "comm", "RG 0 of 0", "RG", 0, 0, 2.0 + late, 6.0)))

    plan = make_plan("1f1b", "none", 1, 1)
    whole = Timeline(1, (Span(0, "compute", "F0", "F", 0, 0, 0.0, 1.0),))
    for replicas in ([replica(0), replica(1.5)], [replica(1.5), replica(0)]):
        first = as_all_joined(replicas)
        assert first.compute(0) == replicas[0].compute(0)
        both = Timeline(1, (*whole.spans, *first.spans))
        assert costs_from_timelines(plan, [both]).exchanges["RG"].times == [2.5]


def test_what_a_rank_does_with_its_replicas_costs_all_buckets_together() -> None:
    plan = make_plan("1f1b", "vocab-2", 2, 4)
    buckets = EvenBuckets(Overlap(reduce=True, updates=True, gather=True), cut=2)
    program = buckets.added_to(lower(plan))
    passes: dict[PassKind, Time] = {**UNIT_COSTS.passes, "U": [0.5, 0.75]}
    exchanges: dict[CommKind, Exchange] = {"RG": Exchange([3.0, 4.0]), "AG": Exchange([1.0, 2.0])}
    costs = Costs(passes, exchanges=exchanges)
    timeline = simulate(program, costs)
    found = costs_from_timelines(plan, [timeline, timeline])
    assert found.passes["U"] == pytest.approx([0.5, 0.75])
    for kind, exchange in exchanges.items():
        assert found.exchanges[kind].times == pytest.approx(exchange.times)
        assert kind not in found.comms
    assert simulate(program, found).end == pytest.approx(timeline.end)
