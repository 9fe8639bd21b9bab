"""Activations on the host: the order of the copies, their time, and the memory that they free."""

from collections import Counter
from dataclasses import replace

import pytest
from harness.properties import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from schedules.cases import Case, cases

from megatron.schedules.check import check
from megatron.schedules.costs import Costs, HopTime
from megatron.schedules.lower import Instruction, Program, Run, Start, Wait, lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.needs import HOST_KINDS, Comm
from megatron.schedules.offload_at_once import with_copies_at_once
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan, plan_of_one
from megatron.simulator.draw.trace import chrome_trace
from megatron.simulator.simulate import simulate

PASSES = Costs(
    {"F": 1.0, "B": 1.0, "W": 1.0, "R": 1.0, "S": 0.25, "E": 0.0, "T": 0.25, "IF": 0.0, "IB": 0.0}
)


def with_copies(out: float, back: float) -> Costs:
    return replace(PASSES, comms={"O": out, "L": back})


def moved(program: Program, rank: int) -> set[tuple[int, int, int]]:
    """Stage, microbatch and slice of all activations that a rank moves."""
    starts = (step.comm for step in program.rows[rank] if isinstance(step, Start))
    return {(comm.stage, comm.microbatch, comm.slice) for comm in starts if comm.kind == "O"}


def without_copies(row: tuple[Instruction, ...]) -> list[Instruction]:
    return [step for step in row if isinstance(step, Run) or step.comm.kind not in HOST_KINDS]


def most_held(program: Program, rank: int) -> int:
    """The most chunks of activations on a rank's device."""
    end = "W" if program.plan.split_backward else "B"
    held = most = 0
    for step in program.rows[rank]:
        if isinstance(step, Run):
            held += sum(item.kind == "F" for item in step.passes)
            most = max(most, held)
            held -= sum(item.kind == end for item in step.passes)
        elif (step.comm.kind, type(step)) in (("O", Wait), ("L", Start)):
            held += 1 if step.comm.kind == "L" else -1
            most = max(most, held)
    return most


def places(program: Program, rank: int) -> dict[object, int]:
    """Place of every pass, and of every begin and end of a copy, in a row."""
    found: dict[object, int] = {}
    for at, step in enumerate(program.rows[rank]):
        for key in step.passes if isinstance(step, Run) else ((type(step), step.comm),):
            assert key not in found, f"{key} twice"
            found[key] = at
    return found


@settings(max_examples=examples(40))
@given(
    case=cases(slices=st.sampled_from([1, 1, 2, 3])),
    chunks=st.integers(1, 4),
    out=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    back=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    free=st.sampled_from([(), ("B",), ("F", "B"), ("W", "IF", "IB")]),
)
@example(Case("gpipe", "none", 2, 7, 1), 1, 0.0, 5.0, ())  # O without time, begun with an L
@example(Case("zb-h1", "vocab-2", 4, 5, 1), 1, 1.0, 0.0, ("F", "B"))  # passes without time
@example(Case("interleaved", "vocab-2", 2, 4, 2, slices=4), 2, 0.3, 1.0, ())
def test_copies_are_in_order_and_let_no_pass_wait(
    case: Case, chunks: int, out: float, back: float, free: tuple[PassKind, ...]
) -> None:
    """Also where the costs say that some passes take no time."""
    plan, costs = case.plan, with_copies(out, back)
    costs = replace(costs, passes={**costs.passes, **dict.fromkeys(free, 0.0)})
    offloaded = replace(plan, offloaded=min(chunks, plan.chunks))
    check(offloaded)
    plain, program = lower(plan, costs), lower(offloaded, costs)
    reader: PassKind = "R" if plan.recomputes else "B"
    for rank in range(plan.ranks):
        assert without_copies(program.rows[rank]) == list(plain.rows[rank])
        at = places(program, rank)
        own = moved(program, rank)
        assert len({stage for stage, _, _ in own}) <= offloaded.offloaded
        for stage, microbatch, part in own:
            there, again = (Comm(kind, microbatch, stage, part) for kind in HOST_KINDS)
            chunk = plan.stages[stage][1]
            order = [
                at[Pass("F", microbatch, chunk, part)],
                at[Start, there],
                at[Wait, there],
                at[Start, again],
                at[Wait, again],
                at[Pass(reader, microbatch, chunk, part)],
            ]
            assert order == sorted(order), (rank, stage, microbatch, part)
        assert most_held(program, rank) <= most_held(plain, rank)
    assert simulate(program, costs).end <= simulate(plain, costs).end * (1 + 1e-9)


@pytest.mark.parametrize("k", [0.5, 1.0, 2.0, 4.0])
def test_as_many_are_moved_as_the_link_has_time_for(k: float) -> None:
    """The time of O and L is k times that of F, B and W; all are moved if k <= 1 (PipeOffload)."""
    plan = replace(make_plan("interleaved", "none", 4, 32, chunks=4, shortened=False), offloaded=4)
    program = lower(plan, with_copies(1.5 * k, 1.5 * k))
    share = len(moved(program, 0)) / (plan.microbatches * plan.chunks)
    assert share == pytest.approx(min(1.0, 1 / k), abs=0.1)  # the lane is free at both ends


@pytest.mark.parametrize("times", [1.5, [1.5, 1.5]], ids=["one time", "a time for each stage"])
def test_slices_take_their_shares_of_a_microbatchs_copies(times: HopTime) -> None:
    """At k = 1 most are moved; if each took the whole time, at most a quarter would be."""
    plan = make_plan("gpipe", "none", 2, 32, shortened=False, slices=4)
    costs = Costs({"F": 1.0, "B": 2.0}, {"O": times, "L": times})
    program = lower(replace(plan, offloaded=1), costs)
    assert len(moved(program, 0)) > 0.75 * plan.units


def test_chunks_that_wait_longest_are_moved() -> None:
    plan = replace(make_plan("interleaved", "none", 4, 16, chunks=4, shortened=False), offloaded=2)
    program = lower(plan, with_copies(0.1, 0.1))
    for rank in range(4):
        stages = Counter(stage for stage, _, _ in moved(program, rank))
        assert stages == {rank: 16, rank + 4: 16}


def most_chunks(
    schedule: str, ranks: int, chunks: int, moved: int, k: float, groups: int = 4
) -> int:
    """The most chunks of activations on any device, with so many chunks of a rank on the host.

    Args:
        schedule: of several chunks.
        ranks: of the pipeline.
        chunks: of a rank.
        moved: chunks of a rank that wait on the host.
        k: time of O and L of a chunk, divided by the time of its passes (``PASSES``).
        groups: of ``ranks`` microbatches.
    """
    plan = make_plan(schedule, "none", ranks, groups * ranks, chunks=chunks, shortened=False)
    program = lower(replace(plan, offloaded=moved), with_copies(1.5 * k, 1.5 * k))
    return max(most_held(program, rank) for rank in range(ranks))


def test_half_the_chunks_hold_three_quarters_of_the_memory() -> None:
    """PipeOffload, section 3: lifespans fall evenly from the first chunk to the last.

    Where chunks take turns, as in Megatron-LM's interleaved schedule, all chunks of a group of
    microbatches are in flight at once, and moving half of them halves the peak only.
    """
    for schedule, share in (("pipeoffload", 1 / 4), ("interleaved", 1 / 2)):
        alone = most_chunks(schedule, 8, 16, 0, 0.0)
        assert most_chunks(schedule, 8, 16, 8, 0.5) / alone == pytest.approx(share, abs=0.05)
        assert most_chunks(schedule, 8, 16, 16, 0.5) / alone < 0.1


@pytest.mark.parametrize("chunks", [2, 4, 8, 16])
@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_half_of_pipeoffload_holds_what_is_published(ranks: int, chunks: int) -> None:
    """Table 1 of arXiv 2503.01328: (v + 2) / (8 v) of v p chunks, beside copies under way."""
    published = (chunks + 2) * ranks / 8
    assert published <= most_chunks("pipeoffload", ranks, chunks, chunks // 2, 0.5)
    assert most_chunks("pipeoffload", ranks, chunks, chunks // 2, 0.5) <= 1.2 * published + 3


@pytest.mark.parametrize("k", [0.25, 0.5, 0.75])
def test_all_of_pipeoffload_holds_a_few_chunks_however_many_there_are(k: float) -> None:
    """Table 1: O(M / (v p)), and about 4 chunks by section 5.3."""
    for ranks in (4, 8, 16):
        for chunks in (2, 4, 8):
            assert most_chunks("pipeoffload", ranks, chunks, chunks, k) <= 6


def test_the_text_form_names_the_chunks() -> None:
    plan = replace(make_plan("interleaved", "vocab-2", 2, 4, chunks=2), offloaded=1)
    assert "\noffloaded 1\n" in plan.to_text()
    assert Plan.from_text(plan.to_text()) == plan
    with pytest.raises(ValueError, match="'offloaded 3' is more than the 2 chunks of a rank"):
        check(replace(plan, offloaded=3))


def test_copies_are_shown_on_a_thread_of_their_rank() -> None:
    plan = replace(make_plan("gpipe", "none", 2, 4), offloaded=1)
    costs = with_copies(0.5, 0.5)
    events = chrome_trace(plan, simulate(lower(plan, costs), costs))["traceEvents"]
    assert isinstance(events, list)
    names = [event["args"].get("name") for event in events if event["ph"] == "M"]
    assert names.count("communication: host") == 1
    shown = {event["name"] for event in events if event["ph"] == "X"}
    copies = {name for name in shown if name[0] in HOST_KINDS}
    assert copies
    assert all(name.endswith(" of 0") for name in copies)  # on rank 1 B follows too soon
    assert sum(name.startswith("O") for name in copies) == len(copies) / 2


@settings(max_examples=examples(20))
@given(
    case=cases(slices=st.sampled_from([1, 1, 2, 3])),
    chunks=st.integers(1, 4),
    out=st.sampled_from([0.0, 0.3, 1.0]),
)
@example(Case("zb-v", "vocab-1", 2, 7, 2, slices=4), 2, 0.0)
def test_a_warm_up_holds_no_more_than_an_iteration(case: Case, chunks: int, out: float) -> None:
    """It moves the same chunks and slices, right after their F and right before they are read."""
    costs = with_copies(out, out)
    plan = replace(case.plan, offloaded=min(chunks, case.plan.chunks))
    training, one = lower(plan, costs), lower(plan_of_one(plan), costs)
    warm = with_copies_at_once(one, training)
    reader: PassKind = "R" if plan.recomputes else "B"
    for rank, row in enumerate(warm.rows):
        assert without_copies(row) == list(one.rows[rank])
        assert {(stage, 0, part) for stage, _, part in moved(training, rank)} == moved(warm, rank)
        assert most_held(warm, rank) <= most_held(training, rank)
        place = places(warm, rank)
        for stage, _, part in moved(warm, rank):
            out_at, back_at = (Comm(kind, 0, stage, part) for kind in ("O", "L"))
            chunk = plan.stages[stage][1]
            assert place[Start, out_at] == place[Pass("F", 0, chunk, part)] + 1
            assert place[Wait, out_at] == place[Start, out_at] + 1
            assert place[Start, back_at] + 1 == place[Wait, back_at]
            assert place[Wait, back_at] + 1 == place[Pass(reader, 0, chunk, part)]
