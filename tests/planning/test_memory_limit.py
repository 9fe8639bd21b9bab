"""A limit by memory, in percent or GiB: what microbatches in flight it leaves every rank."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness.precisions import precision
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.test_run_plan import config

from megatron.parallel.settings import ReplicaSettings
from megatron.planning import limit_of_rank
from megatron.planning.candidate import Candidate
from megatron.planning.count.run import count_ranks
from megatron.planning.dry_run import dry_run
from megatron.planning.limit_of_rank import MemoryLimit, memory_limit_of
from megatron.planning.planned_run import RunPlan
from megatron.planning.run_memory import held_by_ranks
from megatron.planning.run_plan import candidates, make_run_plan, only_rank_0_plans
from megatron.planning.run_request import prepared
from megatron.planning.settled import settled
from megatron.run.own_memory import OwnMemory
from megatron.run.run_config import RunConfig
from megatron.schedules.held import in_flight
from megatron.schedules.limits import Percent
from megatron.schedules.plan import Plan, plan_of_one
from megatron.schedules.search.watch import Watch
from megatron.simulator.costs.gpus import GIB, gpu
from megatron.simulator.costs.rank_memory import RankMemory

FLAG = "--zero-bubble-adaptive-memory-limit-percentile"
GIB_FLAG = "--zero-bubble-memory-limit-gib"
A100 = gpu("A100")
SMALL = 2.0 * GIB
"""Memory of a made-up GPU on which the small model of these tests takes some percent."""


def limited(
    percent: float,
    schedule: str = "zb-auto",
    treatment: str = "none",
    ranks: int = 2,
    *,
    memory: float = SMALL,
    **options: Any,
) -> RunConfig:
    """A run with a limit, in bf16, on GPUs with so much memory."""
    run = config(
        schedule,
        treatment,
        ranks,
        zero_bubble_adaptive_memory_limit_percentile=percent,
        **{"microbatches": 12, "layers": 8, **options},
    )
    run = replace(run, train=replace(run.train, precision=precision(torch.bfloat16)))
    return run.on(replace(A100, memory=memory))


def limited_in_gib(gib: float, *run: Any, **options: Any) -> RunConfig:
    """The same with a limit in GiB."""
    found = limited(100, *run, **options)
    planning = replace(
        found.parallel.planning,
        zero_bubble_adaptive_memory_limit_percentile=None,
        zero_bubble_memory_limit_gib=gib,
    )
    return replace(found, parallel=replace(found.parallel, planning=planning))


def rank_limits(run: RunConfig) -> tuple[float, ...]:
    request, _ = prepared(run, run.parallel.pipeline_schedule, None)
    return request.limits


def two_ranks(number: int) -> Plan:
    """A plan, written by hand, that runs all forwards, then all backwards, then all W."""
    row = " ".join(f"{kind}{i}" for kind in ("F", "B", "W") for i in range(number))
    head = f"microbatches {number}\nstages 0.0 1.0\nvocabulary none\n"
    return Plan.from_text(f"{head}0: {row}\n1: {row}\n")


def by_hand(run: RunConfig, number: int) -> list[float]:
    """Counted bytes of two ranks under the plan by hand."""
    request, layers = prepared(run, "zb-auto", None)
    found = RunPlan(two_ranks(number), layers, request.costs, "zb-auto")
    return list(held_by_ranks(run, found)[0])


@pytest.mark.parametrize("percent", [14.8, 15, 15.5, 16, 16.5])
def test_a_rank_may_have_as_many_microbatches_as_fit_by_hand(percent: float) -> None:
    run = limited(percent)
    room = percent / 100 * SMALL
    held = [by_hand(run, number) for number in range(1, 13)]
    most = tuple(float(sum(of_number[rank] <= room for of_number in held)) for rank in range(2))
    assert rank_limits(run) == most
    assert 1 < min(most) < 12, "the limit has an effect"


def test_one_more_microbatch_takes_what_its_forward_leaves() -> None:
    """Rank 0 keeps what F leaves, without the result that it has sent.

    Rank 1 also keeps its input and logits. Room for 4.5 microbatches beyond the first lets 5 be in
    flight.
    """
    run = limited(50)
    _, layers = prepared(run, "zb-auto", None)
    counts = count_ranks(run, two_ranks(1), layers)
    message = 128 * 512 * 2  # tokens x hidden size x bytes
    logits = 128 * 5000 * 2
    first, last = (count.passes["F", 0].left for count in counts)
    assert logits <= counts[1].rooms <= 1.01 * logits
    of_one = (first - message, last + message + counts[1].rooms)
    base = by_hand(run, 1)
    for rank in range(2):
        memory = (base[rank] + 4.5 * of_one[rank]) / 0.1
        assert rank_limits(limited(10, memory=memory))[rank] == 5.0


CASES = [
    *((schedule, "none", 8000) for schedule in ("zb-auto", "zb-v", "v-half")),
    *(("zb-auto", treatment, 8000) for treatment in ("vocab-2", "interlaced", "redis")),
    ("zb-auto", "vocab-1", 100_000),
    ("zb-v", "vocab-1", 100_000),
]


@pytest.mark.parametrize(("schedule", "treatment", "vocab_size"), CASES)
def test_no_rank_of_a_plan_holds_more(schedule: str, treatment: str, vocab_size: int) -> None:
    roomy = limited(100, schedule, treatment, vocab_size=vocab_size, layers=4, memory=80 * GIB)
    least = max(held_by_ranks(roomy, one_microbatch(roomy))[0])
    run = limited(10, schedule, treatment, vocab_size=vocab_size, layers=4, memory=10.5 * least)
    found = make_run_plan(run)
    peaks, memories = held_by_ranks(run, found)
    assert max(peaks) <= 1.05 * least
    for peak, memory in zip(peaks, memories, strict=True):
        assert peak > memory.always, "a microbatch takes something"
    held = in_flight(found.plan)
    assert not found.limits or all(a <= b for a, b in zip(held, found.limits, strict=True))


def one_microbatch(run: RunConfig) -> RunPlan:
    """The run's plan of its first microbatch, made without a limit."""
    found = make_run_plan(run)
    return replace(found, plan=plan_of_one(found.plan))


def test_a_plan_that_holds_too_much_is_searched_again() -> None:
    """With vocab-1, T waits for idle time, so a rank holds more exponentials than was counted."""
    roomy = limited(100, "zb-auto", "vocab-1", vocab_size=100_000, layers=4, memory=80 * GIB)
    least = max(held_by_ranks(roomy, one_microbatch(roomy))[0])
    run = limited(10, "zb-auto", "vocab-1", vocab_size=100_000, layers=4, memory=10.5 * least)
    found = make_run_plan(run)
    asked = rank_limits(run)
    assert found.limits != asked
    assert all(own <= most for own, most in zip(found.limits, asked, strict=True))
    assert min(found.limits) >= 1


@settings(max_examples=25, deadline=None)
@given(
    st.floats(9, 100),
    st.floats(9, 100),
    st.sampled_from(["zb-auto", "zb-v"]),
    st.sampled_from(["none", "vocab-2"]),
    st.sampled_from([2, 3, 4]),
)
def test_more_percent_never_allow_less(
    one: float, other: float, schedule: str, treatment: str, ranks: int
) -> None:
    low, high = (
        rank_limits(limited(percent, schedule, treatment, ranks, layers=24))
        for percent in sorted((one, other))
    )
    assert not low or high, "without a limit a schedule keeps to its promise"
    assert all(a <= b for a, b in zip(low, high if low else (), strict=True))
    assert all(1 <= limit <= 12 for limit in high)


def test_more_room_makes_a_shorter_plan() -> None:
    """Four ranks hold 4, 3, 2 and 1 microbatches in 1F1B, and idle where they may not."""
    times = []
    for percent in (9, 10, 50):
        [candidate] = one_candidate(limited(percent, ranks=4))
        times.append(candidate.time)
    assert times[0] > times[1] >= times[2]


def one_candidate(run: RunConfig) -> list[Candidate]:
    request, layers = prepared(run, run.parallel.pipeline_schedule, None)
    return [Candidate(run, request, layers, gpu=run.parallel.gpu)]


@pytest.mark.parametrize(
    ("schedule", "treatment"),
    [("zb-auto", "none"), ("zb-auto", "vocab-2"), ("zb-v", "vocab-2"), ("auto", "none")],
)
def test_too_few_percent_are_refused_with_the_least(schedule: str, treatment: str) -> None:
    def plan_with(percent: float) -> Plan:
        return make_run_plan(limited(percent, schedule, treatment, layers=4, microbatches=4)).plan

    with pytest.raises(ValueError, match=rf"^{FLAG} 2: .* of the 2.0 GiB of A100, and ") as caught:
        plan_with(2)
    words = str(caught.value)
    assert words.endswith(" percent or more")
    least = int(words.split()[-4])
    assert plan_with(least).microbatches == 4
    with pytest.raises(ValueError, match=f"give {least} percent"):
        plan_with(least - 1)


def test_a_model_that_never_fits_is_told_so() -> None:
    with pytest.raises(ValueError, match="so no limit would help; --dry-run"):
        make_run_plan(limited(90, memory=0.1 * GIB))


def test_tensors_never_get_more_than_they_can_use() -> None:
    """The rest of the memory is for CUDA, fragments, and communicators of NCCL."""
    run = limited(100)
    limit = memory_limit_of(run)
    assert limit is not None
    count = count_ranks(run, one_microbatch(run).plan, make_run_plan(run).layers)[0]
    memory = RankMemory(count, 1.0, outside=1e6)
    assert limit.use(0, 5.0, memory).room == pytest.approx(0.95 * SMALL - 1e6)
    assert "of which tensors can use 1.9 GiB" in limit.in_words()
    half = MemoryLimit(OwnMemory(SMALL, 0.95 * SMALL, "GPU"), Percent(50))
    assert half.use(0, 5.0, memory).room == SMALL / 2


def test_auto_takes_no_schedule_that_holds_more() -> None:
    run = limited(15, "auto", microbatches=8)
    compared = candidates(run)
    beyond = {c.schedule for c in compared if max(held_by_ranks(run, c.run_plan)[0]) > 0.15 * SMALL}
    assert beyond, "some schedules hold more"
    assert beyond == {c.schedule for c in compared if not c.is_within_limit}
    assert make_run_plan(run).schedule not in beyond
    assert "zb-auto" in {c.schedule for c in compared}


def test_a_schedule_keeps_to_its_promise_where_a_rank_has_no_room_for_more() -> None:
    """zb-v promises p microbatches in flight: 4 here."""
    few, many = (make_run_plan(limited(percent, "zb-v", ranks=4)) for percent in (9.45, 50))
    assert few.limits == ()
    assert max(in_flight(few.plan)) <= 4
    assert min(many.limits) > 4


@pytest.mark.parametrize("treatment", ["none", "vocab-2"])
def test_gib_are_kept_on_every_rank_and_fewer_change_the_plan(treatment: str) -> None:
    """From 0.2 GiB, in steps of 0.01 GiB, down to the first limit that no plan can keep."""

    def run(hundredths: int) -> RunConfig:
        return limited_in_gib(
            hundredths / 100, "zb-auto", treatment, layers=4, microbatches=6, memory=80 * GIB
        )

    plans: list[Plan] = []
    for hundredths in range(20, 0, -1):
        own = run(hundredths)
        try:
            found = make_run_plan(own)
        except ValueError as refusal:
            told = str(refusal)
            break
        plans.append(found.plan)
        assert max(held_by_ranks(own, found)[0]) <= hundredths / 100 * GIB
    assert len(set(plans)) >= 2, "fewer GiB leave another plan"
    assert told.startswith(f"{GIB_FLAG} {hundredths / 100:g}: the limit of a rank is ")
    assert told.endswith(f"give {(hundredths + 1) / 100:g} GiB or more")


def test_gib_are_the_share_of_the_memory_that_they_are() -> None:
    assert rank_limits(limited_in_gib(0.31)) == rank_limits(limited(15.5))
    assert rank_limits(limited_in_gib(0.31)) != rank_limits(limited_in_gib(0.33))


def test_gib_beyond_the_memory_leave_no_more_than_tensors_can_use() -> None:
    limit = memory_limit_of(limited_in_gib(80))
    assert limit is not None
    assert limit.room == pytest.approx(0.95 * SMALL)
    assert limit.in_words() == (
        f"{GIB_FLAG} 80: the limit of a rank is 80.0 GiB of the 2.0 GiB of A100, of which tensors "
        "can use 1.9 GiB"
    )


def test_a_dry_run_and_a_run_tell_the_same_limit() -> None:
    run = limited(15.5)
    report = "\n\n".join(dry_run(run, run.parallel.gpu or A100, Watch()))
    found = make_run_plan(run)
    notes = [note for note in settled(run, found).notes if note.startswith(FLAG)]
    assert len(notes) == 1
    assert f"\n\n{notes[0]}\n\n" in report
    limits = " ".join(f"{rank}:{limit:g}" for rank, limit in enumerate(found.limits))
    assert notes[0].endswith(f"(rank:microbatches): {limits}")
    assert f"{FLAG} 15.5: the limit of a rank is 317.4 MiB of the 2.0 GiB of A100" in notes[0]


def test_replicas_share_the_optimizer_and_leave_room() -> None:
    alone = rank_limits(limited(15))
    replicas = ReplicaSettings(size=8, shard_optimizer=True)
    shared = rank_limits(limited(15, replicas=replicas))
    assert all(own <= more for own, more in zip(alone, shared, strict=True))
    assert max(alone) < max(shared)


def test_ranks_on_cpus_have_equal_parts_of_the_machine() -> None:
    run = config("zb-auto", "none", 2, zero_bubble_adaptive_memory_limit_percentile=10)
    with patch.object(limit_of_rank, "machine_memory", return_value=SMALL):
        limit = memory_limit_of(run)
        assert limit is not None
        assert (limit.memory.bytes, limit.bytes) == (SMALL / 2, 0.1 * SMALL / 2)
        cluster = replace(run.parallel.cluster, ranks_per_node=8)
        eight = replace(run, parallel=replace(run.parallel, cluster=cluster))
        assert (memory_limit_of(eight) or limit).memory.bytes == SMALL / 8


def test_one_rank_plans_under_a_percentage() -> None:
    """Whether or not a rank knows its GPU: all ranks must agree who plans."""
    on_cpus = config("zb-auto", "none", 2, zero_bubble_adaptive_memory_limit_percentile=10)
    assert only_rank_0_plans(on_cpus)
    assert only_rank_0_plans(limited(10))
    assert only_rank_0_plans(limited_in_gib(10))
    assert not only_rank_0_plans(config("zb-auto", zero_bubble_max_pending_backward=3.0))
