"""What ``make_plan`` makes of its options, and what it refuses."""

import re
from ast import literal_eval
from dataclasses import replace
from itertools import product
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from harness.marks import full
from schedules import by_hand
from schedules.cases import few_trials

from megatron.schedules import from_block
from megatron.schedules.block_options import BlockOptions
from megatron.schedules.catalogue import SCHEDULES
from megatron.schedules.costs import UNIT_COSTS, Costs
from megatron.schedules.held import in_flight
from megatron.schedules.make_plan import (
    as_compared,
    make_plan,
    one_microbatch_of,
    plan_for,
    stages_of,
)
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan, evaluation_plan
from megatron.schedules.request import Request

WHOLE = [name for name, known in SCHEDULES.items() if not known.split]


@pytest.mark.parametrize(
    ("schedule", "vocabulary"),
    [
        *product(WHOLE, ("none", "vocab-2")),
        *product(("gpipe", "1f1b", "interleaved", "hanayo"), ("interlaced",)),
    ],
)
def test_a_backward_is_split_on_demand(schedule: str, vocabulary: str) -> None:
    """F and B stay in the order in which they were, and W comes somewhere after its B.

    Interlaced 1F1B-V is set anew where backwards are whole, and stays as it is where they are not.
    """
    whole = make_plan(schedule, vocabulary, 3, 6, shortened=False)
    split = make_plan(schedule, vocabulary, 3, 6, shortened=False, split_backward=True)
    assert not whole.split_backward
    assert split.split_backward
    for before, after in zip(whole.rows, split.rows, strict=True):
        for kind in ("F", "B"):
            assert [p for p in after if p.kind == kind] == [p for p in before if p.kind == kind]
        at = {item: place for place, item in enumerate(after)}
        for item in before:
            if item.kind == "B":
                assert at[Pass("W", item.microbatch, item.chunk)] > at[item]


def test_a_split_backward_saves_time() -> None:
    whole = make_plan("1f1b", "none", 4, 8)
    split = make_plan("1f1b", "none", 4, 8, split_backward=True)
    assert by_hand.span(split, UNIT_COSTS) < by_hand.span(whole, UNIT_COSTS)


@pytest.mark.parametrize("vocabulary", ["none", "vocab-2"])
def test_1f1b_with_its_backward_split_may_hold_and_do_what_zb_h1_does(vocabulary: str) -> None:
    """W fills gaps of any rank, so all may hold what the schedule promises of the first."""
    split = make_plan("1f1b", vocabulary, 4, 8, split_backward=True)
    known = make_plan("zb-h1", vocabulary, 4, 8)
    assert max(in_flight(split)) <= max(in_flight(known))
    assert by_hand.span(split, UNIT_COSTS) <= by_hand.span(known, UNIT_COSTS) + 1e-9


@pytest.mark.parametrize("vocabulary", ["none", "vocab-2", "naive"])
@pytest.mark.parametrize("limit", [1, 2, 4, 5.5, 7])
def test_zb_auto_fits_any_limit_and_more_memory_takes_no_more_time(
    vocabulary: str, limit: float
) -> None:
    with few_trials():
        plan = make_plan("zb-auto", vocabulary, 4, 6, memory_limit=limit)
        more = make_plan("zb-auto", vocabulary, 4, 6, memory_limit=limit + 4)
    assert max(in_flight(plan)) <= limit
    assert by_hand.span(more, UNIT_COSTS) <= by_hand.span(plan, UNIT_COSTS) + 1e-9


def test_auto_takes_the_shortest_that_fits() -> None:
    def end(plan: Plan) -> float:
        return max(map(max, by_hand.end_times(plan, UNIT_COSTS.per_chunk(plan.chunks))))

    with few_trials():
        others = [
            make_plan(schedule, "vocab-2", 3, 6, UNIT_COSTS.per_chunk(known.chunks))
            for schedule, known in SCHEDULES.items()
        ]
        for limit in (4, 7):
            best = make_plan("auto", "vocab-2", 3, 6, memory_limit=limit)
            assert max(in_flight(best)) <= limit
            fitting = [plan for plan in others if max(in_flight(plan)) <= limit]
            assert fitting
            assert end(best) <= min(map(end, fitting)) + 1e-9


def test_a_limit_below_what_a_schedule_holds_says_what_it_holds() -> None:
    message = "1f1b holds up to 4 microbatches a rank, more than the memory limit of 3"
    with pytest.raises(ValueError, match=message):
        make_plan("1f1b", "none", 4, 8, memory_limit=3)
    assert make_plan("1f1b", "none", 4, 8, memory_limit=4) == make_plan("1f1b", "none", 4, 8)


@pytest.mark.parametrize(("schedule", "limit"), [("v-min", 3), ("v-min", 4), ("v-half", 4)])
@pytest.mark.parametrize(("vocabulary", "barriers"), [("none", 0), ("vocab-2", 1)])
def test_memory_above_the_promise_of_a_v_shape_buys_a_shorter_plan(
    schedule: str, limit: int, vocabulary: str, barriers: int
) -> None:
    with few_trials():
        tight = make_plan(schedule, vocabulary, 4, 8)
        more = make_plan(schedule, vocabulary, 4, 8, memory_limit=limit + barriers)
    assert max(in_flight(tight)) < max(in_flight(more)) <= limit + barriers
    assert by_hand.span(more, UNIT_COSTS) < by_hand.span(tight, UNIT_COSTS)


def test_auto_offers_its_limit_only_to_what_fills_it_and_keeps_it() -> None:
    def offered(schedule: str, limit: float | None) -> float | None:
        wanted = Request(schedule, "vocab-2", 8, 16, memory_limit=limit)
        return as_compared(wanted).memory_limit

    assert offered("v-min", 5) == 5
    assert offered("v-min", 4) is None
    assert offered("zb-h1", 20) is None
    assert offered("zb-auto", 3) == 3
    assert offered("v-half", None) is None


@pytest.mark.parametrize("vocabulary", ["none", "vocab-1", "interlaced"])
def test_auto_fits_the_least_memory_that_there_is(vocabulary: str) -> None:
    with few_trials():
        plan = make_plan("auto", vocabulary, 3, 4, memory_limit=1)
    assert max(in_flight(plan)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "2f2b"}, "unknown schedule '2f2b': choose one of gpipe, 1f1b"),
        ({"vocabulary": "vocab-3"}, "unknown vocabulary treatment 'vocab-3': choose one of none"),
        ({"ranks": 0}, "at least 1 rank, got 0"),
        ({"microbatches": 0}, "at least 1 microbatch, got 0"),
        (
            {"microbatches": 10**9},
            "2 ranks x 1 chunks x 1000000000 microbatches are 2,000,000,000 forward passes, and a "
            "plan has at most 4,000,000: take fewer",
        ),
        ({"schedule": "interleaved", "chunks": 10**9}, "and a plan has at most 4,000,000"),
        ({"ranks": 10**9, "schedule": "zb-v"}, "and a plan has at most 4,000,000"),
        ({"memory_limit": 0}, "a memory limit of 0 microbatches a rank fits no schedule"),
        ({"memory_limit": -3}, "a memory limit of -3 microbatches a rank fits no schedule"),
        ({"memory_limit": nan}, "a memory limit of nan microbatches a rank fits no schedule"),
        ({"memory_limit": inf}, "a memory limit of inf microbatches a rank fits no schedule"),
        (
            {"schedule": "interleaved", "chunks": 1},
            "interleaved takes 2, 3, 4, ... chunks a rank, not 1: take 2",
        ),
        ({"chunks": 2}, "1f1b has 1 chunk a rank, not 2: interleaved or hanayo or gis or"),
        ({"schedule": "zb-v", "chunks": 3}, "zb-v has 2 chunks a rank, not 3"),
        (
            {"options": BlockOptions.of(group=2)},
            "1f1b has no use for group=2: only interleaved has groups whose size can be",
        ),
        ({"schedule": "gis", "options": BlockOptions.of(group=2)}, "gis has no use for group=2"),
        (
            {"schedule": "interleaved", "options": BlockOptions.of(group=1)},
            "groups of 1 microbatch are smaller than the pipeline of 2 ranks, so rank 0 would wait "
            "in every turn for the last rank: take 2 or more",
        ),
        ({"schedule": "zb-auto"}, "zb-auto fills the memory it is given: give it a memory limit"),
        ({"schedule": "file"}, "a plan file goes with the schedule 'file', and that needs one"),
        ({"file": Path("plan.txt")}, "1f1b has no use for file=plan.txt: a plan file goes with"),
        ({"seconds": 5.0}, "1f1b has no use for seconds=5.0: only 'optimal' searches for as long"),
        ({"schedule": "auto", "seconds": 5.0}, "auto has no use for seconds=5.0"),
        (
            {"schedule": "optimal", "vocabulary": "interlaced"},
            "optimal does not know ranks that meet: take zb-auto for interlaced",
        ),
        ({"schedule": "file", "file": Path("no.txt")}, "cannot read the plan file no.txt: No such"),
    ],
)
def test_what_is_no_plan_is_refused(changes: dict[str, Any], message: str) -> None:
    wanted: dict[str, Any] = {
        "schedule": "1f1b", "vocabulary": "none", "ranks": 2, "microbatches": 2, **changes
    }  # fmt: skip
    with pytest.raises(ValueError, match=re.escape(message)):
        make_plan(**wanted)


@pytest.mark.parametrize(
    ("schedule", "option"),
    [
        *product(("zb-auto", "optimal", "auto", "file"), ("chunks=2", "shortened=False")),
        ("file", "split_backward=True"),
    ],
)
def test_what_a_schedule_without_a_block_would_ignore_is_refused(
    schedule: str, option: str
) -> None:
    of_schedule: dict[str, dict[str, Any]] = {
        "zb-auto": {"memory_limit": 2}, "file": {"file": Path("plan.txt")}
    }  # fmt: skip
    needs = of_schedule.get(schedule, {})
    name, value = option.split("=")
    with pytest.raises(ValueError, match=f"^{schedule} has no use for {option}: "):
        make_plan(schedule, "none", 2, 2, **needs, **{name: literal_eval(value)})


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", [*SCHEDULES, "zb-auto", "optimal", "file"])
@pytest.mark.parametrize("vocabulary", [full("none"), "vocab-2"])
def test_the_stages_are_known_before_the_plan(
    schedule: str, vocabulary: str, tmp_path: Path
) -> None:
    file = tmp_path / "plan.txt"
    file.write_text(make_plan("v-half", vocabulary, 3, 4).to_text())
    of_schedule: dict[str, dict[str, Any]] = {
        "zb-auto": {"memory_limit": 4}, "optimal": {"seconds": 2}, "file": {"file": file}
    }  # fmt: skip
    needs = of_schedule.get(schedule, {})
    if schedule == "optimal":
        pytest.importorskip("ortools")
    request = Request(schedule, vocabulary, 3, 4, **needs)
    with few_trials():
        assert stages_of(request) == plan_for(request).stages


@pytest.mark.parametrize("vocabulary", ["none", "vocab-2", "naive", "interlaced"])
def test_a_plan_that_was_saved_is_loaded(vocabulary: str, tmp_path: Path) -> None:
    plan = make_plan("v-half", vocabulary, 3, 6)
    path = tmp_path / "plan.txt"
    path.write_text(plan.to_text())
    assert make_plan("file", vocabulary, 3, 6, file=path) == plan


@pytest.mark.parametrize(
    ("old", "new", "reasons"),
    [
        ("B1 F3 B2", "F3 B2", ["rank 1 never runs B1", "B0 F2 F3 B2 B3 > <"]),
        ("B1 F3 B2", "B1 B1 F3 B2", ["rank 1 runs B1 twice", "B0 F2 B1 >B1< F3 B2 B3"]),
        ("B1 F3 B2", "B1 W1 F3 B2", ["rank 1 cannot run W1", "B0 F2 B1 >W1< F3 B2 B3"]),
        ("B1 F3 B2", "B1 F7 B2", ["rank 1 cannot run F7", "B0 F2 B1 >F7< B2 B3"]),
        ("F3 B2 B3\n2", "B3 F3 B2\n2", ["rank 1 waits at B3 for F3, G3 from 2", ">B3< F3 B2"]),
        ("B1 F3 B2", "B1 Z3 B2", ["line 5: 'Z3' is no pass"]),
    ],
)
def test_a_plan_file_that_cannot_run_is_shown_with_the_cell_and_the_reason(
    old: str, new: str, reasons: list[str], tmp_path: Path
) -> None:
    text = make_plan("1f1b", "none", 3, 4).to_text()
    assert text.count(old) == 1
    path = tmp_path / "plan.txt"
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=re.escape(reasons[0])) as caught:
        make_plan("file", "none", 3, 4, file=path)
    assert all(reason in str(caught.value) for reason in reasons)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("number", ["1000000000", "9" * 5000])
def test_a_plan_file_of_endless_microbatches_is_refused_at_once(
    number: str, tmp_path: Path
) -> None:
    text = make_plan("1f1b", "none", 3, 4).to_text()
    path = tmp_path / "plan.txt"
    path.write_text(text.replace("microbatches 4", f"microbatches {number}"))
    with pytest.raises(ValueError, match=r"plan\.txt.* (rank 0 never runs B4 F4|line 1: 'mic)"):
        make_plan("file", "none", 3, 4, file=path)


def test_a_binary_file_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.txt").write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match=r"plan\.txt holds no plan: it is no text: .*; give one"):
        make_plan("file", "none", 3, 4, file=tmp_path / "plan.txt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 4}, "plan.txt is a plan for 3 ranks, not 4 ranks: ask for 3 ranks, or"),
        ({"microbatches": 1}, "for 4 microbatches, not 1 microbatch: ask for 4 microbatches"),
        ({"vocabulary": "vocab-1"}, "treatment vocab-2, not vocab-1: ask for vocab-2, or give"),
        ({"vocabulary": "none"}, "treatment vocab-2, not none: ask for vocab-2, or give"),
        ({"vocabulary": "interlaced"}, "treatment vocab-2, not interlaced"),
    ],
)
def test_a_plan_file_of_another_pipeline_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.txt"
    path.write_text(make_plan("1f1b", "vocab-2", 3, 4).to_text())
    wanted: dict[str, Any] = {"vocabulary": "vocab-2", "ranks": 3, "microbatches": 4, **changes}
    with pytest.raises(ValueError, match=re.escape(message)):
        make_plan("file", file=path, **wanted)


def test_a_file_says_which_treatments_it_fits(tmp_path: Path) -> None:
    """Redistribution moves layers, which no plan knows of."""
    path = tmp_path / "plan.txt"
    path.write_text(make_plan("1f1b", "none", 3, 4).to_text())
    assert make_plan("file", "redis", 3, 4, file=path) == make_plan("file", "none", 3, 4, file=path)
    with pytest.raises(ValueError, match="none or redis, not vocab-2: ask for none or redis"):
        make_plan("file", "vocab-2", 3, 4, file=path)


def test_a_plan_that_evaluates_is_none_to_train_with(tmp_path: Path) -> None:
    path = tmp_path / "plan.txt"
    path.write_text(evaluation_plan(make_plan("1f1b", "vocab-2", 3, 4)).to_text())
    with pytest.raises(ValueError, match=r"plan\.txt is 'forward only'"):
        make_plan("file", "vocab-2", 3, 4, file=path)


@pytest.mark.parametrize("options", [{"schedule": "zb-1p"}, {"split_backward": True}])
def test_costs_without_w_split_no_backward(options: dict[str, Any]) -> None:
    wanted = {"schedule": "1f1b"} | options
    with pytest.raises(ValueError, match=f"{wanted['schedule']} splits .* the costs have no W"):
        make_plan(
            **wanted, vocabulary="none", ranks=2, microbatches=2, costs=Costs({"F": 1.0, "B": 2.0})
        )


@pytest.mark.parametrize("vocabulary", [full("none"), "vocab-2", full("interlaced")])
@pytest.mark.parametrize(
    "schedule", ["1f1b", full("interleaved"), "zb-h1", full("zb-2p"), "zb-v", full("v-half")]
)
def test_the_unit_of_costs_does_not_matter(schedule: str, vocabulary: str) -> None:
    """Costs may be FLOPs or seconds; by powers of two, so that nothing is rounded differently."""
    times: dict[PassKind, float] = {
        "F": 1.1,
        "B": 1.3,
        "W": 0.9,
        "S": 0.7,
        "T": 0.6,
        "IF": 0.1,
        "IB": 0.2,
    }
    plans = {
        make_plan(
            schedule,
            vocabulary,
            3,
            7,
            Costs({kind: scale * time for kind, time in times.items()}, {"X": 0.1 * scale}),
        )
        for scale in (1.0, 2.0**-30, 2.0**50)
    }
    assert len(plans) == 1


def test_requests_that_differ_share_no_kept_block() -> None:
    """Each plan is the one that is made where nothing is kept yet, in whichever order they come."""
    late = Costs(UNIT_COSTS.passes, {"C0": 1.5})
    plain = Request("interleaved", "vocab-2", 4, 24, shortened=True)
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"costs": late},
        {"vocabulary": "vocab-1"},
        {"chunks": 3},
        {"options": BlockOptions.of(group=6)},
        {"slices": 2},
        {"split_backward": True},
        {"recompute_ahead": 1},
        {"microbatches": 5},
        {"shortened": False},
    )
    requests = [replace(plain, quick=True, **change) for change in (*changes, *changes)]
    kept = [(plan_for(request), one_microbatch_of(request)) for request in requests]
    for request, found in zip(requests, kept, strict=True):
        from_block._treated_block.cache_clear()
        from_block.one_microbatch.cache_clear()
        assert (plan_for(request), one_microbatch_of(request)) == found
    assert len({plan.to_text() for plan, _ in kept}) == len(changes)
