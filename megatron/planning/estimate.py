"""The time and memory of a run without its own plan, which may take long to find.

A plan of one microbatch gives a lower bound of the time, a plan of few microbatches an estimate.

The first microbatches fill a pipeline and the last ones empty it. Every microbatch between them
takes the same time, the steady interval, and adds no memory. So a plan of two rounds of the
pipeline tells as much as a plan of hundreds of microbatches.
"""

from math import ceil, gcd
from typing import NamedTuple

from megatron.planning.forecast_run import forecast_run
from megatron.planning.planned_run import RunPlan
from megatron.planning.run_memory import Fullest
from megatron.run.run_config import RunConfig
from megatron.schedules.catalogue import SCHEDULES
from megatron.schedules.from_block import block_of
from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan
from megatron.schedules.request import Request
from megatron.schedules.search.bound import least_time_by
from megatron.simulator.costs.gpus import Gpu
from megatron.simulator.simulate import Timeline


class Estimate(NamedTuple):
    """The expected time and memory of a run on a GPU.

    Attributes:
        seconds: seconds of an iteration.
        samples_per_second: speed, which can be compared between batch sizes.
        mfu: share of the peak of all devices.
        fullest: the rank that holds the most.
        fits: whether every rank has enough memory.
        planned: microbatches of the plan from which the figures follow.
        microbatches: microbatches of the run.
        in_flight: the most microbatches that a rank holds.
        cut: whether a longer search might find a better plan.
    """

    seconds: float
    samples_per_second: float
    mfu: float
    fullest: Fullest
    fits: bool
    planned: int
    microbatches: int
    in_flight: float
    cut: bool


def least_seconds(config: RunConfig, one: RunPlan, gpu: Gpu, *, paired: bool = False) -> float:
    """Return a lower bound of the seconds of an iteration under every plan.

    Args:
        config: the run.
        one: a plan of the run's schedule for one microbatch.
        gpu: the GPU of every rank.
        paired: whether, in a run with pairs, every F is in a pair with a B. A plan that joins other
            passes too may take less time than the result.
    """
    found = forecast_run(config, one, gpu)
    times = {
        (span.rank, span.label): span.end - span.start
        for span in found.timeline.spans
        if span.lane == "compute"
    }
    hidden = one.costs.without_waits()

    def time_of(rank: int, item: Pass) -> float:
        if not config.parallel.pairs.joins:
            return times[rank, str(item)]
        time = hidden.of_pass(one.plan, rank, item)  # pairs may hide every wait
        if paired and item.kind == "F":
            backward = item._replace(kind="B")
            pair = one.costs.of_pair(one.plan, rank, (item, backward))
            return max(time, pair - hidden.of_pass(one.plan, rank, backward))
        return time

    least = least_time_by(
        one.plan,
        time_of,
        config.train.num_microbatches,
        one.plan.treatment.contributing,
    )
    return least + found.outcome.once + found.outcome.step


def planned_microbatches(request: Request) -> int:
    """Return how many microbatches suffice for an estimate of a schedule: at most all.

    Two rounds of the pipeline (2 p microbatches) and one microbatch suffice. If W keeps only a
    share of the activations, more rounds are needed. If the microbatches of a schedule go in
    groups, the last group is as full as in the run. All microbatches are needed by a schedule whose
    memory grows with each of them, and by a plan from a file.

    A round of slices has 2 p slices. The last microbatch of slices is not like the others, so it
    is one more. Pairs stand between the first B of the last rank and its last F alone, so a plan
    with pairs needs two more rounds.
    """
    p, m, n = request.ranks, request.microbatches, request.slices
    pairs = 2 * p * request.joined
    if request.schedule not in SCHEDULES:
        return m
    known = request.catalogued
    if (rounds := ceil(2 * p / known.kept / n) + 1 + (n > 1) + pairs) >= m:
        return m
    group = max(block_of(request, known).group, 1)
    few = min(rounds + (m - rounds) % (group // gcd(group, n)), m)
    chunks = request.chunks or known.chunks
    grows = known.promise(p, m * n, chunks) > known.promise(p, few * n, chunks)
    return m if grows else few


def steady_interval(timeline: Timeline, plan: Plan) -> float:
    """Return the time that one more microbatch takes, in the unit of the timeline.

    The result is the mean time between two B of the last stage in the last round of the pipeline,
    and at least the busiest rank's work for one microbatch. The plan must have more microbatches
    than ranks.

    Between the B of a microbatch's slices stand F of the next microbatch. So the last microbatch of
    slices, which none follows, is left out. The plan must have two microbatches more than a round.
    """
    rank, chunk = plan.stages[-1]
    ends = {
        span.microbatch: span.end
        for span in timeline.compute(rank)
        if span.kind == "B" and span.chunk == chunk
    }
    last, around = plan.microbatches - 1 - (plan.slices > 1), ceil(plan.ranks / plan.slices)
    between = (ends[last] - ends[last - around]) / around
    return max(between, *(_work_of_one(timeline, plan, rank) for rank in range(timeline.ranks)))


def _work_of_one(timeline: Timeline, plan: Plan, rank: int) -> float:
    """Return the time that a rank's passes of one more microbatch take.

    A plan with pairs has few of them while the pipeline fills and empties, where passes take longer
    alone. So only passes between the first B of the rank and its last F count there.
    """
    passes = [span for span in timeline.compute(rank) if span.kind != "U"]
    whole = sum(span.length for span in passes) / plan.microbatches
    if not plan.pairs:
        return whole
    filled = next(span.end for span in passes if span.kind == "B")
    emptied = max(span.start for span in passes if span.kind == "F")
    steady = [span for span in passes if filled <= span.start < emptied]
    halves = sum(span.kind in ("F", "B") for span in steady)
    if not halves:
        return whole
    per_half = sum(span.length for span in steady) / halves
    return min(whole, 2 * plan.chunks * plan.slices * per_half)
