"""What a job is predicted to wait for, without and with pairs of passes.

A wait of a pass for a collective of tensor, context or expert ranks is *exposed* if the rank
computes nothing meanwhile.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from megatron.planning.forecast_run import RunForecast, forecast_run
from megatron.planning.run_plan import make_run_plan
from megatron.planning.where_time_goes import PassSeconds, items_of, where_time_goes
from megatron.run.command_line import parse
from megatron.schedules.passes import Pass
from megatron.simulator.costs.gpus import GIB, GPUS
from megatron.simulator.costs.reasons import WorkReason
from megatron.simulator.simulate import Span
from tools.predictions.kept import kept

OF_LAYERS: Final = "--tp-comm-overlap"
"""The flag of pairs that switch at collectives of tensor and context ranks."""
OF_EXPERTS: Final = "--overlap-moe-expert-parallel-comm"
"""The flag of pairs that switch while tokens travel to experts."""
LIMIT: Final = "--zero-bubble-max-pending-backward"

AXES: Final[tuple[WorkReason, ...]] = ("tensor", "context", "experts")
"""The ranks whose collectives pairs hide."""

PLACES: Final = ("first F", "last B", "F and B alone", "F with B", "other pairs", "W alone")
"""Where waits are exposed: in F that runs alone before the first B of its rank; in B that runs
alone after the last F of its rank; in other F and B that run alone; in pairs of F and B; in other
pairs; and in W that runs alone."""


class Job(NamedTuple):
    """A job, without pairs.

    Attributes:
        name: of its layout, which names the file of its prediction.
        schedule: its name, with the chunks of a rank behind a slash if these can be chosen.
        treatment: of the vocabulary.
        flags: of its dry run.
        gpu: kind of its GPUs.
        pairs: the flag that joins passes.
        limit: most microbatches in flight; 0: those that the schedule promises.
    """

    name: str
    schedule: str
    treatment: str
    flags: str
    gpu: str
    pairs: str = OF_LAYERS
    limit: int = 0

    def forecast(self, *, paired: bool) -> RunForecast:
        """Return the dry run, without or with pairs."""
        limit = f" {LIMIT} {self.limit}" if self.limit else ""
        words = f"{self.flags}{limit}{f' {self.pairs}' if paired else ''}".split()
        config = parse(words, 1, speak=False)
        return forecast_run(config, make_run_plan(config), GPUS[self.gpu])


class Figures(NamedTuple):
    """The predicted figures of a job.

    Attributes:
        seconds: of an iteration.
        waits: seconds of it in which passes wait, by the axis of the collective.
        slower: seconds by which passes take longer because collectives run beside them.
        idle: share of it in which ranks wait for work of other ranks.
        memory: GiB of the rank that holds the most.
        fits: whether the memory suffices.
        places: exposed seconds by place, a mean over the ranks.
    """

    seconds: float
    waits: dict[str, float]
    slower: float
    idle: float
    memory: float
    fits: bool
    places: dict[str, float]

    @classmethod
    def of(cls, found: RunForecast) -> "Figures":
        """Return the figures of a forecast."""
        seconds, reasons = found.outcome.seconds, where_time_goes(found)
        return cls(
            seconds,
            {axis: reasons[axis] for axis in AXES},
            reasons["crowding"],
            max(0.0, reasons["idle"] / seconds),  # -1e-17 where there is none
            max(found.outcome.peak) / GIB,
            found.fits,
            exposed(found),
        )

    @property
    def exposed(self) -> float:
        """Seconds in which passes wait for tensor, context or expert ranks."""
        return sum(self.waits.values())


def figures(job: Job, keep: Path | None = None, *, paired: bool) -> Figures:
    """Return the figures of a job; ``keep`` is the folder of predictions that are kept."""
    name = f"{job.name} {job.schedule} {job.treatment} {job.limit} {'pairs' if paired else 'alone'}"
    own: Figures = kept(keep, name, Figures, lambda: Figures.of(job.forecast(paired=paired)))
    return own


def exposed(found: RunForecast) -> dict[str, float]:
    """Return the exposed seconds of passes by place (``PLACES``), a mean over the ranks."""
    passes, ranks = PassSeconds(found), found.run_plan.plan.ranks
    total = dict.fromkeys(PLACES, 0.0)
    for rank in range(ranks):
        items = [spans for spans in items_of(found.timeline, rank) if spans[0].kind != "U"]
        begin = min(span.start for spans in items for span in spans if span.kind == "B")
        end = max(span.end for spans in items for span in spans if span.kind == "F")
        for spans in items:
            alone = [passes.of(span) for span in spans]
            left = sum(own[axis] for own in alone for axis in AXES)
            if len(spans) > 1:
                lasts = sum(span.length for span in spans) - passes.crowding(spans)
                left -= max(0.0, sum(sum(own.values()) for own in alone) - lasts)
            total[_place(spans, begin, end)] += max(0.0, left) / ranks
    return total


class PassWaits(NamedTuple):
    """What a pass of a chunk in the middle waits for if it runs alone.

    Attributes:
        kind: of the pass.
        seconds: of the pass.
        waits: seconds of it in which it waits for collectives.
        hidden: the part of these that another pass may hide.
        switches: how often it lets the other pass of a pair work.
    """

    kind: str
    seconds: float
    waits: float
    hidden: float
    switches: int


def pass_waits(found: RunForecast) -> Iterator[PassWaits]:
    """Yield what F, B and W of the second rank's first chunk wait for; ``found`` is with pairs."""
    passes, plan, rank = PassSeconds(found), found.run_plan.plan, 1
    spans = [span for span in found.timeline.compute(rank) if span.chunk == 0]
    for kind in ("F", "B", "W"):
        for span in [span for span in spans if span.kind == kind][:1]:
            own, item = passes.of(span), Pass(kind, 0)
            yield PassWaits(
                kind,
                sum(own.values()),
                sum(own[axis] for axis in AXES),
                found.alone.waits_of(plan, rank, item),
                found.alone.journeys_of(plan, rank, item),
            )


def _place(spans: Sequence[Span], begin: float, end: float) -> str:
    """Return the place of a pass, or of a pair.

    Args:
        spans: of the pass, or of both passes.
        begin: of the first B of the rank.
        end: of the last F of the rank.
    """
    kinds = {span.kind for span in spans}
    if len(spans) > 1:
        return "F with B" if kinds == {"F", "B"} else "other pairs"
    if spans[0].kind == "W":
        return "W alone"
    if spans[0].end <= begin:
        return "first F"
    return "last B" if spans[0].start >= end else "F and B alone"
