"""The drawing of the page, as JSON values: spans, needs of passes, and memory over time."""

from collections.abc import Sequence

from megatron.schedules.held import held_changes
from megatron.schedules.lower import Program, Run
from megatron.schedules.needs import Comm, needs, sources
from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan, passes_of
from megatron.simulator.costs.rank_memory import RankMemory, held
from megatron.simulator.simulate import Span, Timeline

Named = tuple[str | int | float, ...]
Row = dict[str, list[Named]]
Steps = list[tuple[float, float]]
"""A quantity over time: from each time on, it has the value beside it."""


def drawing(timeline: Timeline) -> dict[str, object]:
    """Return the spans of a timeline by rank, each counted from the first start of all.

    A pass is ``[kind, microbatch, chunk, start, end]``, then its slice if that is not the first, or
    if the pass is in a pair, and then the name of the other pass of the pair. A communication or a
    wait has its name in place of the chunk.
    """
    everything = (*timeline.spans, *timeline.waits)
    origin = min((span.start for span in everything), default=0.0)
    end = max((span.end for span in everything), default=0.0)
    rows: list[Row] = [{"passes": [], "comms": [], "waits": []} for _ in range(timeline.ranks)]
    for rank, row in enumerate(rows):
        row["passes"] = [_named(span, span.chunk, origin) for span in timeline.compute(rank)]
    for lane, spans in (("comms", timeline.spans), ("waits", timeline.waits)):
        for span in spans:
            if span.lane != "compute":
                rows[span.rank][lane].append(_named(span, span.label, origin))
    return {"end": end - origin, "ranks": rows}


def needs_of_first(plan: Plan) -> list[list[dict[str, object]]]:
    """Return the needs of each rank's passes of microbatch 0; other microbatches need the same.

    ``own`` are passes of the rank; ``comms`` are communications by their kind, with the passes
    whose results they move.
    """
    return [[_needed(plan, rank, item) for item in passes_of(plan, rank)] for rank in _ranks(plan)]


def _needed(plan: Plan, rank: int, item: Pass) -> dict[str, object]:
    needed = needs(plan, rank, item)
    return {
        "kind": item.kind,
        "chunk": item.chunk,
        "slice": item.slice,
        "own": [(need.kind, need.chunk, need.slice) for need in needed if isinstance(need, Pass)],
        "comms": [
            {
                "kind": need.kind,
                "from": [
                    (at, each.kind, each.chunk, each.slice) for at, each in sources(plan, need)
                ],
            }
            for need in needed
            if isinstance(need, Comm)
        ],
    }


def microbatches_over_time(plan: Plan, timeline: Timeline, kept: float) -> list[Steps]:
    """Return for every rank the microbatches whose activations it holds.

    F adds its share when it begins; B and W take theirs away when they end.

    Args:
        plan: what runs.
        timeline: of the plan, whose passes are those of its rows in order, beside updates (U).
        kept: share of the activations that counts as held from B to W.
    """
    over_time = []
    for rank in _ranks(plan):
        total, steps = 0.0, [(0.0, 0.0)]
        planned = (span for span in timeline.compute(rank) if span.kind != "U")
        for span, item in zip(planned, plan.rows[rank], strict=True):
            change = held_changes(plan, item, kept).activations
            if change:
                total += change
                at = span.start if change > 0 else span.end
                steps.append((at, total / (plan.chunks * plan.slices)))
        over_time.append(steps)
    return over_time


def bytes_over_time(
    program: Program, timeline: Timeline, memories: Sequence[RankMemory]
) -> list[Steps]:
    """Return for every rank the bytes that it holds.

    Bytes that are held between two passes, by communications, count where the later one begins, and
    those after the last pass where that ends.

    Args:
        program: what runs.
        timeline: of the program.
        memories: of its ranks.
    """
    return [_bytes_of(program, timeline, memory, rank) for rank, memory in enumerate(memories)]


def _bytes_of(program: Program, timeline: Timeline, memory: RankMemory, rank: int) -> Steps:
    steps: Steps = []
    spans = iter(timeline.compute(rank))
    most, at = 0.0, 0.0
    for step, (during, after) in zip(program.rows[rank], held(program, memory, rank), strict=True):
        most = max(most, during)
        if isinstance(step, Run):
            own = [next(spans) for _ in step.passes]
            at = own[-1].end
            steps += [(own[0].start, most), (at, after)]
            most = after
    return [*steps, (at, max(most, after + memory.afterwards)), (at, after)]


def _ranks(plan: Plan) -> range:
    return range(plan.ranks)


def _named(span: Span, name: str | int, origin: float) -> Named:
    named = span.kind, span.microbatch, name, span.start - origin, span.end - origin
    if span.beside:
        return (*named, span.slice, span.beside)
    return (*named, span.slice) if span.slice else named
