"""The trace shows every span once, and an arrow from what was waited for to what waited."""

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.schedules.costs import UNIT_COSTS, Costs
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import COMM_KINDS
from megatron.schedules.pairs import joined
from megatron.schedules.plan import Plan
from megatron.simulator.draw.trace import chrome_trace
from megatron.simulator.segments import with_segments
from megatron.simulator.simulate import Timeline, simulate

Event = dict[str, Any]


def simulated(schedule: str, vocabulary: str, p: int, m: int, comm: float) -> tuple[Plan, Timeline]:
    costs = Costs(UNIT_COSTS.passes, dict.fromkeys(COMM_KINDS, comm))
    plan = make_plan(schedule, vocabulary, p, m, costs)
    return plan, simulate(lower(plan, costs), costs)


def events_of(plan: Plan, timeline: Timeline) -> list[Event]:
    events: list[Event] = json.loads(json.dumps(chrome_trace(plan, timeline)))["traceEvents"]
    return events


def arrows(events: list[Event]) -> list[tuple[Event, Event]]:
    """Return the slices that every arrow connects, each found as viewers find it."""
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["dur"]:
            slices[event["pid"], event["tid"]].append(event)

    def around(end: Event) -> Event:
        own = slices[end["pid"], end["tid"]]
        (found,) = [e for e in own if e["ts"] <= end["ts"] < round(e["ts"] + e["dur"], 3)]
        return found

    starts = {e["id"]: around(e) for e in events if e["ph"] == "s"}
    ends = {e["id"]: around(e) for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert all(e["bp"] == "e" for e in events if e["ph"] == "f")
    return [(starts[number], ends[number]) for number in starts]


cases = {
    "schedule": st.sampled_from(["1f1b", "interleaved", "zb-h1", "v-half"]),
    "vocabulary": st.sampled_from(["none", "naive", "vocab-1", "vocab-2", "interlaced"]),
    "p": st.integers(2, 5),
    "m": st.integers(1, 5),
    "comm": st.sampled_from([0.0, 0.3, 1.7]),
}


@settings(max_examples=examples(25))
@given(**cases)
def test_every_span_is_shown_once_on_its_rank_and_slices_of_a_thread_do_not_overlap(
    schedule: str, vocabulary: str, p: int, m: int, comm: float
) -> None:
    plan, timeline = simulated(schedule, vocabulary, p, m, comm)
    shown = [e for e in events_of(plan, timeline) if e["ph"] == "X"]
    assert sorted((e["pid"], e["cat"], e["name"]) for e in shown) == sorted(
        (s.rank, s.lane, s.label) for s in (*timeline.spans, *timeline.waits)
    )
    threads = defaultdict(list)
    for event in shown:
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in threads.values():
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(sorted(slices)))


@settings(max_examples=examples(25))
@given(**cases)
def test_arrows_lead_from_what_is_done_to_what_begins(
    schedule: str, vocabulary: str, p: int, m: int, comm: float
) -> None:
    for source, target in arrows(events_of(*simulated(schedule, vocabulary, p, m, comm))):
        assert source["ts"] + source["dur"] <= target["ts"] + 1e-9


def names(pairs: list[tuple[Event, Event]]) -> set[tuple[str, str]]:
    return {(f"{s['pid']} {s['name']}", f"{t['pid']} {t['name']}") for s, t in pairs}


def test_arrows_of_two_ranks_by_hand() -> None:
    """Messages take time: an arrow into the message, and one that crosses over."""
    assert names(arrows(events_of(*simulated("1f1b", "none", 2, 1, 0.5)))) == {
        ("0 F0", "0 X0 from 0"),
        ("0 X0 from 0", "1 F0"),
        ("1 F0", "1 B0"),
        ("1 B0", "1 G0 from 1"),
        ("1 G0 from 1", "0 B0"),
        ("0 F0", "0 B0"),
    }


def test_arrows_lead_from_pass_to_pass_where_messages_are_free() -> None:
    found = names(arrows(events_of(*simulated("1f1b", "none", 2, 1, 0.0))))
    assert found == {("0 F0", "1 F0"), ("1 F0", "1 B0"), ("1 B0", "0 B0"), ("0 F0", "0 B0")}


def test_a_barrier_is_shown_on_every_rank_with_arrows_in_and_out() -> None:
    found = names(arrows(events_of(*simulated("1f1b", "vocab-2", 3, 1, 0.5))))
    for rank in range(3):
        assert {(f"{rank} S0", f"{rank} C1 0"), (f"{rank} C1 0", f"{rank} T0")} <= found
        assert ("2 C0 0", f"{rank} S0") in found or rank == 2


def test_processes_and_threads_have_names() -> None:
    events = events_of(*simulated("v-half", "vocab-2", 3, 4, 0.1))
    meta = {(e["name"], e["pid"], e["tid"]): e["args"] for e in events if e["ph"] == "M"}
    for event in events:
        assert meta["process_name", event["pid"], 0] == {"name": f"rank {event['pid']}"}
        assert ("thread_name", event["pid"], event["tid"]) in meta
    threads = {
        a["name"] for (what, pid, _), a in meta.items() if what == "thread_name" and pid == 0
    }
    assert threads == {
        "compute",
        "waiting",
        "communication: collectives",
        *(f"communication: {kind} to rank 1" for kind in "XG"),
        *(f"communication: {kind} from rank 1" for kind in "XG"),
    }


def test_pairs_are_shown_in_segments_and_tokens_on_a_thread_of_their_own() -> None:
    costs = Costs({"F": 3.0, "B": 3.0, "W": 1.0}, waits={"F": 1.0, "B": 1.0})
    order = make_plan("dualpipe-v", "none", 2, 5, costs.without_waits(), shortened=False)
    plan = joined(order, costs)
    assert plan.pairs
    timeline = with_segments(simulate(lower(plan, costs), costs), plan, costs)
    events = events_of(plan, timeline)
    shown = [e for e in events if e["ph"] == "X"]
    pair = next(span for span in timeline.spans if span.beside)
    for lane in ("compute", "work", "tokens"):
        own = (e for e in shown if (e["pid"], e["cat"]) == (pair.rank, lane))
        found = [e for e in own if e["name"] == pair.label]
        assert len(found) == {"compute": 0, "work": 2, "tokens": 2}[lane]
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    on = {e["cat"]: threads[e["pid"], e["tid"]] for e in shown}
    assert on["work"] == on["compute"] == "compute"
    assert on["tokens"] == "communication: tokens of experts"
    assert {(s["cat"], t["cat"]) for s, t in arrows(events)} >= {("work", "compute")}


def test_a_recorded_second_is_a_million_microseconds() -> None:
    plan, timeline = simulated("1f1b", "none", 2, 1, 0.5)
    document: Any = chrome_trace(plan, timeline, microseconds=1e6)
    shown = {(e["pid"], e["name"]): e for e in document["traceEvents"] if e["ph"] == "X"}
    spans = {(span.rank, span.label): span for span in timeline.spans if span.lane == "compute"}
    for place, span in spans.items():
        assert shown[place]["ts"] == span.start * 1e6
        assert shown[place]["dur"] == (span.end - span.start) * 1e6
