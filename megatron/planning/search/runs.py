"""The runs that a search looks at, with what is known of their time and memory."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import Final, Literal, NamedTuple

from megatron.parallel.settings import PipelineRankSettings
from megatron.planning.candidate import BOUND, Candidate
from megatron.planning.estimate import planned_microbatches
from megatron.planning.known import Known, Level
from megatron.planning.other_process import Rehearsal
from megatron.planning.processes import Workers
from megatron.planning.run_plan import asked
from megatron.planning.search.dimensions import PAIRS
from megatron.run.line import Key, Line
from megatron.run.schedule import chunks_of, schedule_of, treatment_of, uses_limit
from megatron.run.train import batch_share
from megatron.schedules.block_options import BlockOptions
from megatron.schedules.catalogue import SCHEDULES
from megatron.schedules.from_block import promised
from megatron.schedules.limits import LimitByMemory
from megatron.schedules.request import Request
from megatron.schedules.search.watch import Watch
from megatron.schedules.settings import PlanSettings, SliceSettings
from megatron.simulator.costs.gpus import Gpu
from megatron.simulator.simulate import Timeline
from megatron.simulator.ways_folder import is_shown

_MANY_FORWARDS: Final = 1000
"""A plain estimate searches no plan of few microbatches that has more forwards of slices."""
_MOST_PAIRED: Final = 2500
"""Forwards of the largest plan of few microbatches with pairs that the search itself has chosen.
Such a plan takes about 5 s."""

Look = Literal["bound", "estimate", "searched"]
"""How a run is looked at: by bounds, by a plain estimate, or by one whose plan is searched."""


class Task(NamedTuple):
    """A run to look at.

    Attributes:
        look: how.
        line: the flags of the run.
    """

    look: Look
    line: Line

    @property
    def key(self) -> tuple[Look, Key]:
        """A key that tells tasks apart."""
        return self.look, self.line.key


class Figures(NamedTuple):
    """What a look at a run has found.

    Attributes:
        known: time and memory.
        timeline: of the plan of few microbatches; ``None``: it is not kept.
        work: seconds of work in another process.
    """

    known: Known
    timeline: Timeline | None = None
    work: float = 0.0


class Runs:
    """The runs of a search on one kind of GPU, each looked at once at every level.

    Attributes:
        gpu: the GPU of every rank.
        timelines: by the key of a line, the timeline of the plan of few microbatches by which the
            line was estimated, if a page can show it; ``None``: timelines are not kept.
    """

    def __init__(
        self,
        gpu: Gpu,
        watch: Watch | None = None,
        *,
        keeps_timelines: bool = False,
        processes: int = 1,
    ) -> None:
        """Begin without any run.

        Args:
            gpu: the GPU of every rank.
            watch: is told the work; if it has a limit, it ends the search for a plan early.
            keeps_timelines: whether ``timelines`` are kept.
            processes: processes that look at runs at once (``Workers``); ``close`` ends them. A
                watch with a limit allows no more than this process, because what is done before
                its limit must not depend on guesses.
        """
        self.gpu = gpu
        self._watch = Watch() if watch is None else watch
        self.timelines: dict[Key, Timeline] | None = {} if keeps_timelines else None
        self._known: dict[Key, Known] = {}
        alone = self._watch.seconds is not None
        self._workers: Workers[Task, Figures] | Rehearsal[Task, Figures]
        self._workers = Workers(self._seen_elsewhere, 1 if alone else processes)
        self._guesses_plans = False

    def close(self) -> None:
        """End the other processes."""
        self._workers.close()

    def rehearse(self, work: Callable[[], object]) -> None:
        """Let another process go ahead with work that looks at runs, while this one makes plans.

        The other process makes no whole plan: it takes plans to be as they were estimated. It shows
        nothing, and nobody gets the result of ``work``; the looks that it has had are had.
        """

        def alone(rehearsal: Rehearsal[Task, Figures]) -> None:
            self._workers, self._guesses_plans = rehearsal, True
            self._watch.silence()
            with suppress(ValueError):  # told where the work is done
                work()

        self._workers.rehearse(alone)

    def candidate(self, line: Line) -> Candidate:
        """Return the run of a line with its schedule.

        Raises:
            ValueError: the line makes no run, or one that cannot be planned.
        """
        return asked(line.run(self.gpu))[0]

    def known(self, line: Line) -> Known | None:
        """Return what is known of a line."""
        return self._known.get(line.key)

    def bound(self, line: Line) -> Known:
        """Return the lower bounds of a line, or more if more is known.

        Raises:
            ValueError: the line makes no run, or one that cannot be planned.
        """
        known = self.known(line)
        return self._looked("bound", line) if known is None else known

    def estimate(self, line: Line) -> Known:
        """Return the time and memory of a line by a plan of few microbatches, or by its own plan.

        Raises:
            ValueError: the line makes no run, or one that cannot be planned.
        """
        known = self.known(line)
        if known is not None and known.level != "bound":
            return known
        return self._looked("estimate", line)

    def searched(self, line: Line) -> Known:
        """Return the time and memory of a line by a plan of few microbatches that is searched."""
        return self._looked("searched", line)

    def expect(self, look: Look, lines: Iterable[Line], each: int = 1) -> None:
        """Say which lines are likely to be asked for, the likeliest first.

        Args:
            look: how they will be looked at.
            lines: the lines.
            each: lines that a process may be given at once (``Workers.expect``).
        """
        if self.helpers:
            tasks = (Task(look, line) for line in lines if self._tells_more(look, line))
            self._workers.expect({own.key: own for own in tasks}, each)

    @property
    def helpers(self) -> int:
        """Number of other processes that look at runs."""
        return self._workers.number

    def _tells_more(self, look: Look, line: Line) -> bool:
        """Whether a look at a line tells more than is known."""
        known, looks = self.known(line), ("bound", "unsearched", "estimate", "plan")
        done = {"bound": "bound", "estimate": "unsearched", "searched": "estimate"}[look]
        return known is None or looks.index(known.level) < looks.index(done)

    def _looked(self, look: Look, line: Line) -> Known:
        """Look at a line, here or in another process."""
        task = Task(look, line)
        found = self._workers.result(task.key, task)
        if found is None:
            seen = partial(self._seen, watch=self._watch.part(inf))
            here = self._seen_elsewhere if self._guesses_plans else seen
            found = self._workers.here(task.key, partial(here, task))
        self._watch.did(found.work)
        if self.timelines is not None and found.timeline is not None:
            self.timelines[line.key] = found.timeline
        return self._learnt(line, found.known)

    def _seen_elsewhere(self, task: Task) -> Figures:
        watch = Watch()
        return self._seen(task, watch)._replace(work=watch.worked)

    def _seen(self, task: Task, watch: Watch) -> Figures:
        candidate = self.candidate(task.line)
        if task.look != "bound":
            return self._estimated(task.line, candidate, watch, plain=task.look == "estimate")
        watch.did(BOUND)
        least = candidate.least_memory
        return Figures(Known("bound", candidate.time_in_pairs, least, least.fits(self.gpu)))

    def _estimated(self, line: Line, candidate: Candidate, watch: Watch, *, plain: bool) -> Figures:
        if has_chosen_pairs(line) and _forwards(candidate.request) > _MOST_PAIRED:
            raise ValueError(
                f"pairs of passes are tried in plans of at most {_MOST_PAIRED:,} forwards; give "
                f"{' or '.join(PAIRS.options)} to have them planned in any case"
            )
        unsearched = plain and (
            candidate.is_long or candidate.request.joined or _has_many_slices(candidate)
        )
        if unsearched:
            candidate = replace(candidate, request=replace(candidate.request, shortened=False))
        few = candidate.of_few(watch, quick=True)
        found = candidate.estimate_by(few)
        level: Level = "unsearched" if unsearched else "estimate"
        known = Known(level, found.seconds, found.fullest, found.fits, found.planned)
        assert few.forecast is not None, "runs are looked at on a GPU"
        timeline = few.forecast.timeline if self.timelines is not None else None
        return Figures(known, timeline if timeline is not None and is_shown(timeline) else None)

    def plan(self, line: Line) -> tuple[Known, Candidate]:
        """Return the time and memory of a line by its own plan, and the candidate with the plan."""
        candidate = self.candidate(line)
        if self._guesses_plans and (known := self.known(line)) is not None:
            return self._learnt(line, known._replace(level="plan")), candidate
        _ = candidate.run_plan
        return self._learnt(line, candidate.known), candidate

    def _learnt(self, line: Line, found: Known) -> Known:
        self._known[line.key] = found
        return found


def _has_many_slices(candidate: Candidate) -> bool:
    """Return whether a plain estimate leaves slices in the order of their block."""
    request = candidate.request
    return request.shortened and request.slices > 1 and _forwards(request) > _MANY_FORWARDS


def has_chosen_pairs(line: Line) -> bool:
    """Return whether the search, and not the user, asks for pairs of passes."""
    return any(edit.option in PAIRS.options and edit.values is not None for edit in line.edits)


def _forwards(request: Request) -> int:
    """Return the forwards of slices in a plan of few microbatches."""
    chunks = request.chunks or request.traits.chunks
    return planned_microbatches(request) * request.slices * request.ranks * chunks


class Promise(NamedTuple):
    """What is known of the order of passes that a line asks for, without a plan.

    Attributes:
        held: microbatches that a rank holds at most.
        bubble: microbatches that would fill a rank's idle time, about.
        waiting: share of the held activations that wait for W, about. Their layers have been
            computed again, so no recomputation makes these activations fewer.
        limit: the limit by memory that a plan may fill beyond ``held``; ``None``: there is no
            limit, or the schedule does not heed it.
    """

    held: float
    bubble: float
    waiting: float = 0.0
    limit: LimitByMemory | None = None


def promise_of(line: Line) -> Promise:
    """Return what the schedule and the treatment of a line promise.

    A schedule that is searched or read from a file promises what 1F1B holds, and no idle time.
    """
    flags = line.flags
    name, microbatches = schedule_of(flags), max(1, batch_share(flags).microbatches)
    known, ranks = SCHEDULES.get(name), flags[PipelineRankSettings].size
    limit = flags[PlanSettings].limit_by_memory if uses_limit(flags) else None
    if known is None:
        return Promise(min(ranks, microbatches), 0.0, limit=limit)
    chunks = chunks_of(flags) if known.takes_chunks else None
    request = Request(
        name,
        treatment_of(flags),
        ranks,
        microbatches,
        chunks=chunks,
        slices=flags[SliceSettings].num_seq_splits,
        options=flags[BlockOptions].taken_by(known).sound(ranks),  # a rule refuses the others
    )
    held = max(1.0, min(promised(request, request.catalogued), microbatches))
    waiting = known.kept / 2 if known.split else 0.0  # the first ranks wait less, the last more
    bubble = known.rough_bubble(ranks, chunks or known.chunks, microbatches * request.slices)
    return Promise(held, bubble / request.slices, waiting, limit)
