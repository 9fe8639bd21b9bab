"""Gradients are reduced once their last pass is done, and beside the passes that are left."""

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.schedules.buckets import (
    Bucket,
    Touch,
    gathering,
    reduction,
    with_reductions,
    with_updates,
)
from megatron.schedules.catalogue import TRAITS
from megatron.schedules.costs import Costs, Time
from megatron.schedules.lower import Instruction, Program, Run, Start, Wait, lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.passes import Pass, PassKind
from megatron.schedules.plan import Plan
from megatron.simulator.simulate import simulate

SCHEDULES = ("1f1b", "gpipe", "zb-h1", "zb-v", "v-half", "interleaved", "1f1b-v")
PASSES: dict[PassKind, Time] = {
    "F": 1.0,
    "B": 1.0,
    "W": 1.0,
    "S": 0.3,
    "T": 0.3,
    "E": 0.1,
    "IF": 0.1,
    "IB": 0.1,
}


def buckets_of(plan: Plan) -> list[list[Bucket]]:
    """For every rank the vocabulary's matrices, and the norms and the matrices of every chunk."""
    products: PassKind = "W" if plan.split_backward else "B"
    touched: list[tuple[PassKind, int]] = [("T", 0), ("IB", 0)]
    if not plan.treatment.is_sharded:
        touched = []
    for chunk in range(plan.chunks):
        touched += [("B", chunk), (products, chunk)]
    return [[Bucket(frozenset({touch}), 1 / len(touched)) for touch in touched]] * plan.ranks


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_of_which_nobody_has_a_summand_are_left_alone(overlap: bool) -> None:
    plan = make_plan("1f1b", "vocab-2", 2, 4)
    program = lower(plan)
    some: frozenset[Touch] = frozenset({("B", 0)})
    alone, shared = Bucket(some, 0.5, is_reduced=False), Bucket(some, 0.5)
    found = with_reductions(program, [[alone, shared], [alone, alone]], overlap=overlap)
    assert found.rows[1] == program.rows[1]
    comm = reduction(0, 1)  # buckets keep their numbers
    added = [step for step in found.rows[0] if step not in program.rows[0]]
    assert added == [Start(comm), Wait(comm)]
    assert dict(found.shares) == {comm: 0.5}
    assert with_reductions(program, [[alone], [alone]], overlap=overlap).rows == program.rows


@settings(max_examples=examples(30))
@given(
    schedule=st.sampled_from(SCHEDULES),
    treatment=st.sampled_from(["none", "vocab-1", "vocab-2", "interlaced"]),
    ranks=st.integers(1, 4),
    rounds=st.integers(1, 3),
    overlap=st.booleans(),
)
def test_every_bucket_is_reduced_once_and_complete(
    schedule: str, treatment: str, ranks: int, rounds: int, overlap: bool
) -> None:
    plan = make_plan(schedule, treatment, ranks, ranks * rounds)
    program = lower(plan)
    buckets = buckets_of(plan)
    reduced = with_reductions(program, buckets, overlap=overlap)
    assert [without_reductions(row) for row in reduced.rows] == list(program.rows)
    for rank, row in enumerate(reduced.rows):
        for number, bucket in enumerate(buckets[rank]):
            comm = reduction(rank, number)
            [start] = [i for i, s in enumerate(row) if isinstance(s, Start) and s.comm == comm]
            [wait] = [i for i, s in enumerate(row) if isinstance(s, Wait) and s.comm == comm]
            touching = [
                place
                for place, step in enumerate(row)
                if isinstance(step, Run) and (step.item.kind, step.item.chunk) in bucket.after
            ]
            passes = [place for place, step in enumerate(row) if isinstance(step, Run)]
            assert touching[-1] < start < wait
            assert passes[-1] < wait
            if overlap:  # nothing but other reductions lies between
                assert all(
                    isinstance(step, Start) and step.comm.kind == "RG"
                    for step in row[touching[-1] + 1 : start]
                )
            else:
                assert passes[-1] < start


def without_reductions(row: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    return tuple(step for step in row if isinstance(step, Run) or step.comm.kind != "RG")


def end(program: Program, time: float) -> float:
    return simulate(program, Costs(PASSES, {"RG": time})).end


def test_what_overlaps_takes_no_time_but_the_last_bucket() -> None:
    plan = make_plan("zb-h1", "none", 2, 8)
    program = lower(plan)
    early, late = (
        with_reductions(program, buckets_of(plan), overlap=overlap) for overlap in (True, False)
    )
    alone = end(program, 0.0)
    assert end(early, 0.0) == end(late, 0.0) == alone
    assert end(late, 3.0) == pytest.approx(alone + 3.0)
    assert alone < end(early, 3.0) < alone + 3.0


def test_a_program_has_its_reductions_once() -> None:
    plan = make_plan("1f1b", "none", 2, 4)
    reduced = with_reductions(lower(plan), buckets_of(plan))
    with pytest.raises(AssertionError, match="already"):
        with_reductions(reduced, buckets_of(plan))


def test_a_bucket_that_no_pass_adds_to_is_an_error() -> None:
    plan = make_plan("1f1b", "none", 2, 4)
    with pytest.raises(AssertionError, match="no pass of the row"):
        with_reductions(lower(plan), [[Bucket(frozenset({("W", 0)}), 1.0)]] * 2)


def test_all_schedules_here_exist() -> None:
    assert set(SCHEDULES) <= set(TRAITS)


def read_by(plan: Plan) -> list[list[Bucket]]:
    """For every rank the vocabulary's matrices, and the layers of every chunk."""
    touched: list[tuple[PassKind, PassKind, int]] = [("T", "S", 0), ("IB", "IF", 0)]
    if not plan.treatment.is_sharded:
        touched = []
    touched += [("B", "F", chunk) for chunk in range(plan.chunks)]
    return [
        [
            Bucket(frozenset({(adds, chunk)}), 1 / len(touched), frozenset({(reads, chunk)}))
            for adds, reads, chunk in touched
        ]
    ] * plan.ranks


@settings(max_examples=examples(30))
@given(
    schedule=st.sampled_from(SCHEDULES),
    treatment=st.sampled_from(["none", "vocab-1", "vocab-2", "naive"]),
    ranks=st.integers(1, 4),
    rounds=st.integers(1, 3),
    overlap=st.booleans(),
)
def test_every_bucket_is_updated_and_gathered_before_it_is_read(
    schedule: str, treatment: str, ranks: int, rounds: int, overlap: bool
) -> None:
    plan = make_plan(schedule, treatment, ranks, ranks * rounds)
    program, buckets = lower(plan), read_by(plan)
    updated = with_updates(with_reductions(program, buckets), buckets, overlap=overlap)
    for rank, row in enumerate(updated.rows):
        first_reads = []
        for number, bucket in enumerate(buckets[rank]):
            comm = gathering(rank, number)
            [update] = [i for i, s in enumerate(row) if s == Run(Pass("U", number))]
            [start] = [i for i, s in enumerate(row) if isinstance(s, Start) and s.comm == comm]
            [wait] = [i for i, s in enumerate(row) if isinstance(s, Wait) and s.comm == comm]
            reads = [
                place
                for place, step in enumerate(row)
                if isinstance(step, Run) and (step.item.kind, step.item.chunk) in bucket.before
            ]
            passes = [
                place
                for place, step in enumerate(row)
                if isinstance(step, Run) and step.item.kind != "U"
            ]
            assert update < start < wait < reads[0]
            assert start < passes[0]
            assert overlap or wait < passes[0]
            first_reads.append((reads[0], update))
        assert sorted(first_reads) == sorted(first_reads, key=lambda pair: pair[1])
        assert updated.shares[gathering(rank, 0)] == buckets[rank][0].share


def test_gathering_overlaps_with_passes_that_read_other_buckets() -> None:
    plan = make_plan("interleaved", "none", 2, 4)
    buckets = read_by(plan)
    ends = [
        simulate(
            with_updates(lower(plan), buckets, overlap=overlap),
            Costs({**PASSES, "U": 0.0}, {"AG": 1.0}),
        ).end
        for overlap in (False, True)
    ]
    alone = simulate(lower(plan), Costs(PASSES)).end
    assert alone < ends[1] < ends[0] == pytest.approx(alone + 1.0)
