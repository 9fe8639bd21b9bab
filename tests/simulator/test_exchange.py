"""The exchange of replicas: its time by hand, and no more of it hidden than passes can hide."""

from dataclasses import replace

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.schedules.costs import Costs, Exchange, Time
from megatron.schedules.lower import Program, Run, lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.passes import PassKind
from megatron.simulator.costs.collective_time import Path
from megatron.simulator.costs.replicas import Replicas
from megatron.simulator.exchange import EvenBuckets, Exchanges, Overlap, hidden
from megatron.simulator.simulate import Timeline, simulate

PASSES: dict[PassKind, Time] = {
    "F": 1.0,
    "B": 1.0,
    "W": 1.0,
    "S": 0.3,
    "T": 0.3,
    "IF": 0.1,
    "IB": 0.1,
}
ALL = Overlap(reduce=True, updates=True, gather=True)


def program_of(schedule: str, vocabulary: str, ranks: int, m: int, overlap: Overlap) -> Program:
    return EvenBuckets(overlap).added_to(lower(make_plan(schedule, vocabulary, ranks, m)))


def total(timeline: Timeline, rank: int, kind: str) -> float:
    spans = [span for span in timeline.spans if span.rank == rank and span.kind == kind]
    return sum(span.end - span.start for span in spans)


def test_without_overlap_a_single_rank_waits_for_all_of_it() -> None:
    program = program_of("1f1b", "none", 1, 4, Overlap(updates=True))
    costs = Costs({**PASSES, "U": 2.0}, {"RG": 3.0, "AG": 5.0})
    assert simulate(program, costs).end == pytest.approx(4 * 3 + 2 + 3 + 5)
    assert [own.share for own in hidden(program, costs).values()] == [0, 0]


def test_the_gathering_of_the_second_chunk_is_hidden_behind_the_first() -> None:
    """U0 (1), AG0 (2) beside U1 (1), wait; F0 F1 (2) beside AG1 (2), then the second chunk."""
    program = program_of("interleaved", "none", 2, 2, ALL)
    costs = Costs({"F": 1.0, "B": 2.0, "U": 2.0}, {"AG": 4.0})
    timeline = simulate(program, costs)
    starts = {span.label: span.start for span in timeline.compute(0)}
    assert [starts[label] for label in ("U0", "U1", "F0", "F1")] == [0, 1, 3, 4]
    [gathered] = [s for s in timeline.spans if s.label == "AG 1 of 0"]
    assert (gathered.start, gathered.end) == (3, 5)
    found = hidden(program, costs)
    assert found["AG"].alone == 4
    assert found["AG"].added == pytest.approx(timeline.end - simulate(program, free(costs)).end)


def free(costs: Costs) -> Costs:
    return replace(costs, comms={}, exchanges={})


def test_every_bucket_waits_for_its_latency() -> None:
    costs = Costs(PASSES, exchanges={"RG": Exchange([6.0], 0.5)})
    program = EvenBuckets(Overlap(), cut=4).added_to(lower(make_plan("1f1b", "none", 1, 2)))
    spans = [span for span in simulate(program, costs).spans if span.kind == "RG"]
    assert [span.end - span.start for span in spans] == pytest.approx([6 / 4 + 0.5] * 4)
    assert hidden(program, costs)["RG"].alone == pytest.approx(6 + 4 * 0.5)


@settings(max_examples=examples(25), deadline=None)
@given(
    schedule=st.sampled_from(["1f1b", "gpipe", "zb-h1", "zb-v", "interleaved"]),
    vocabulary=st.sampled_from(["none", "vocab-2", "interlaced"]),
    ranks=st.integers(2, 4),
    rounds=st.integers(1, 2),
    times=st.tuples(*[st.floats(0.01, 9.0)] * 3),
)
def test_ranks_pay_what_their_buckets_cost_and_overlap_never_lengthens(
    schedule: str, vocabulary: str, ranks: int, rounds: int, times: tuple[float, float, float]
) -> None:
    update, reduced, gathered = times
    per_rank = [reduced * (1 + rank) for rank in range(ranks)]
    costs = Costs(
        {**PASSES, "E": 0.1, "U": update},
        {"AG": gathered},
        {"RG": Exchange(per_rank)},
    )
    m = ranks * rounds
    beside = program_of(schedule, vocabulary, ranks, m, ALL)
    after = program_of(schedule, vocabulary, ranks, m, Overlap(updates=True))
    timeline = simulate(beside, costs)
    for rank in range(ranks):
        assert total(timeline, rank, "U") == pytest.approx(update)
        assert total(timeline, rank, "AG") == pytest.approx(gathered)
        assert total(timeline, rank, "RG") == pytest.approx(per_rank[rank])
    alone = simulate(beside, replace(free(costs), passes={**costs.passes, "U": 0.0})).end
    end = simulate(after, costs).end
    assert alone <= timeline.end <= end + 1e-9
    assert end <= alone + update + gathered + max(per_rank) + 1e-9


def test_even_buckets_have_a_share_each_and_all_of_it_together() -> None:
    plan = make_plan("zb-v", "vocab-2", 2, 4)
    for own in EvenBuckets(ALL, cut=3).of(plan):
        assert len(own) == 3 * (2 + 2)
        assert sum(bucket.share for bucket in own) == pytest.approx(1)
    program = program_of("zb-v", "vocab-2", 2, 4, ALL)
    for row in program.rows:
        kinds = {step.item.kind for step in row if isinstance(step, Run)}
        assert kinds == {"U", "F", "B", "W", "S", "T", "IF", "IB"}


def exchanges(replicas: Replicas, overlap: Overlap) -> Exchanges:
    plan = make_plan("1f1b", "none", 2, 4)
    link = Path(bandwidth=10.0, latency=0.5)
    return Exchanges(replicas, link, EvenBuckets(overlap).of(plan), [60, 80], [3, 4], overlap)


def test_a_step_outside_of_the_program_updates_and_gathers() -> None:
    sharded = Replicas(4, sharded=True)
    assert exchanges(sharded, Overlap(updates=True)).step == 0
    assert exchanges(sharded, Overlap()).step == pytest.approx(4 + 3 / 4 * 160 / 10 + 3 * 0.5)
    assert exchanges(Replicas(4), Overlap()).step == 4


def test_parameters_in_8_bits_are_gathered_in_half_the_time() -> None:
    found = exchanges(Replicas(4, sharded=True), Overlap())
    narrow = replace(found, gathered=[30, 80])
    assert narrow.step == found.step
    narrow = replace(found, gathered=[30, 40])
    assert narrow.step == pytest.approx(4 + 3 / 4 * 80 / 10 + 3 * 0.5)
    assert found.bytes_sent - narrow.bytes_sent == pytest.approx(3 / 4 * 2 * 40)


def test_parameters_in_8_bits_are_updated_in_the_time_of_all_others() -> None:
    """Two buckets of equal size: the second one's gathering has half the bytes of the first's."""
    plan = make_plan("interleaved", "none", 2, 2)
    [wide, narrow], *others = EvenBuckets(ALL).of(plan)
    own = [replace(wide, gathered=2 / 3), replace(narrow, gathered=1 / 3)]
    program = ALL.added_to(lower(plan), [own, *others])
    timeline = simulate(program, Costs({"F": 1.0, "B": 2.0, "U": 2.0}, {"AG": 3.0}))
    lengths = {span.label: span.length for span in timeline.spans if span.rank == 0}
    assert (lengths["U0"], lengths["U1"]) == (1.0, 1.0)
    assert (lengths["AG 0 of 0"], lengths["AG 1 of 0"]) == pytest.approx((2.0, 1.0))


@pytest.mark.parametrize("sharded", [False, True])
def test_the_program_of_an_iteration_takes_the_time_of_the_link(sharded: bool) -> None:
    overlap = Overlap(updates=sharded)
    found = exchanges(Replicas(4, sharded=sharded), overlap)
    plan = make_plan("1f1b", "none", 2, 4)
    program, costs = found.added_to(lower(plan), Costs({"F": 1.0, "B": 2.0}))
    timeline = simulate(program, costs)
    reduced = 3 / 4 * 4 * 80 * (1 if sharded else 2)
    steps = 3 if sharded else 6
    assert total(timeline, 1, "RG") == pytest.approx(reduced / 10 + 0.5 * steps)
    assert total(timeline, 1, "U") == (4 if sharded else 0)
    assert found.bytes_sent == pytest.approx(reduced + (3 / 4 * 2 * 80 if sharded else 0))
