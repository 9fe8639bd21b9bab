"""The best runs among all edits of a line: a rough count first, then estimates, then plans.

All combinations of choices are ranked by a rough count (``coarse.py``). The most promising is
estimated by a plan of few microbatches, again and again; an estimate corrects what is expected of
combinations with the same stages and order of passes. Then the best run is varied. Then the same
follows for the choices of later dimensions, with estimates of their own. Last, the fastest are
planned in full. Work is counted, not timed, so a question has the same answer on every machine.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from math import inf
from typing import Final

from megatron.planning.candidate import Candidate
from megatron.planning.known import Known, costs
from megatron.planning.search.coarse import Coarse
from megatron.planning.search.expected import Expected
from megatron.planning.search.rough import Combination, Ordering, Rough
from megatron.planning.search.runs import Runs
from megatron.planning.search.ways import Found, Way, best_first, best_of, by_seconds, varied
from megatron.run.dimension import Dimension
from megatron.run.edit import Choice
from megatron.run.line import Key, Line, opened
from megatron.schedules.search.fastest import look_closer
from megatron.schedules.search.watch import Watch
from megatron.simulator.costs.gpus import Gpu
from megatron.simulator.units import TIME

ESTIMATES: Final = 36
"""Plans of few microbatches that a search makes of first choices in later dimensions."""
LATER_ESTIMATES: Final = 12
"""Plans of few microbatches that a search makes of other choices in later dimensions. It makes none
that is not expected to be faster, without any hope, than the best run without these choices."""
_COMPARED: Final = 0.6
"""Share of the estimates that compares layouts; the rest varies the best of them."""
_LEAST: Final = 0.5
"""Share of the estimates that compares layouts even if none is expected to be faster."""
_SMALLEST: Final = 3
"""Estimates of the smallest combinations, if no other fits."""
_BEGIN: Final = 3
"""Runs of another search with which a search begins, beside the best of all."""
_REFUSALS: Final = 8
"""Combinations that rules may refuse until others of their stages and order are passed over."""
_GUESSES: Final = 2
"""Guesses of what is estimated next, for each other process."""
_MOST_PASSES: Final = 130_000
"""Passes of the largest plan that is made in full; others are estimated by few microbatches."""


class Search:
    """A search over the dimensions of a run on one kind of GPU."""

    def __init__(
        self,
        gpu: Gpu,
        dimensions: Sequence[Dimension],
        estimates: int = ESTIMATES,
        watch: Watch | None = None,
        runs: Runs | None = None,
    ) -> None:
        """Prepare a search.

        Args:
            gpu: the GPU of every rank.
            dimensions: what may be chosen.
            estimates: plans of few microbatches that may be made before later dimensions.
            watch: shows the progress; if it has a limit of time, it ends the search early.
            runs: what another search on this GPU has learnt; ``None``: nothing.
        """
        self._watch = Watch() if watch is None else watch
        self._dimensions = tuple(dimensions)
        self._estimates, self._made = estimates, 0
        self._all = estimates + LATER_ESTIMATES * any(own.later for own in dimensions)
        self._runs = Runs(gpu) if runs is None else runs
        self._ways: dict[Key, Way] = {}
        self._expected = Expected()
        self._refusals = Counter[Ordering]()
        self._roughs: dict[Key, Rough] = {}
        self._planned: dict[Combination, Candidate] = {}
        self._fitted = False
        self._found = Found()

    def run(
        self,
        line: Line,
        begin: Sequence[Way] = (),
        meanwhile: Callable[[Found], object] | None = None,
    ) -> Found:
        """Search the edits of a line.

        Args:
            line: the line.
            begin: runs of another search, the fastest first. The combinations of the best are
                looked at first, each with all choices of the last dimension.
            meanwhile: what is done with the result later, and looks at more runs. It may be
                rehearsed while whole plans are made (``Runs.rehearse``), with a result without
                them.

        Raises:
            ValueError: nothing among them makes a run; the error has the reasons.
        """
        coarse, rough = self._ranked(line)
        early = [way for way in begin if coarse.has(way.choices)]
        self._look(line, coarse, rough, [*best_first(early), *early[:_BEGIN]], _LEAST)
        self._choose(whole=False)  # a whole plan may take long, and a later choice be better
        left = self._estimates
        if more := self._later(line, coarse, rough):
            self._vary_later(line, coarse)
            self._look(line, coarse, more, [way for way in best_first(begin) if way not in early])
        self._estimates = left
        self._expected.hopefully()
        if meanwhile is not None:
            self._choose(whole=False)
            if self._found.taken is not None:
                self._runs.rehearse(partial(meanwhile, self._found))
        self._settle(line, [*rough, *more])
        self._check_found()
        return self._found

    def look(self, line: Line, wanted: int) -> Found:
        """Search the edits of a line for several runs that fit, by plans of few microbatches.

        Args:
            line: the line.
            wanted: number of the fastest runs whose plans are searched, if the time suffices.

        Raises:
            ValueError: nothing among them makes a run, or the time did not suffice for any.
        """
        coarse, rough = self._ranked(line)
        self._look(line, coarse, rough, (), _LEAST)
        if not self._watch.is_over and (more := self._later(line, coarse, rough)):
            self._vary_later(line, coarse)
            self._look(line, coarse, more, ())
        self._check_found()

        def shown() -> list[Way]:
            named = varied(self._fitting(), wanted)
            return [way for way in named if way.known.level == "unsearched"]

        look_closer(shown, costs, lambda way: self._watch.is_over, self._look_at)
        self._sort()
        return self._found

    def _ranked(self, line: Line) -> tuple[Coarse, list[Rough]]:
        """Return combinations with first choices of later dimensions, and their rough counts."""
        dimensions = [own.at_first for own in opened(self._dimensions, line)]
        coarse = Coarse(line, dimensions, self._runs, self._found.refused, self._watch)
        self._watch.begin("layouts, schedules and treatments of the vocabulary")
        coarse.count()
        return coarse, coarse.first()

    def _check_found(self) -> None:
        """Raise ``ValueError`` with the reasons if no choice makes a run."""
        if not self._ways:
            raise ValueError("\n".join(self._found.refused) or "no choice makes a run")

    def _later(self, line: Line, coarse: Coarse, before: Sequence[Rough]) -> list[Rough]:
        """Return the combinations with other choices in later dimensions than the first choices.

        From now on a few estimates are made, and only of combinations that are expected to be
        faster without optimism.
        """
        coarse.dimensions = opened(self._dimensions, line)
        if not any(own.later for own in coarse.dimensions):
            return []
        self._estimates = LATER_ESTIMATES
        self._expected.soberly()
        coarse.count([way.choices for way in self._ways.values()])
        known = {own.choices for own in before}
        return [own for own in coarse.first() if own.choices not in known]

    def _look(
        self,
        line: Line,
        coarse: Coarse,
        rough: Sequence[Rough],
        begin: Iterable[Way],
        least: float = 0.0,
    ) -> None:
        """Look at combinations, and vary the best run.

        Args:
            line: the line that they edit.
            coarse: ranks combinations near a run.
            rough: the combinations.
            begin: runs whose combinations are looked at first, each with all choices of the last
                dimension.
            least: share of the estimates that compares layouts in any case.
        """
        self._found.combinations += len(rough)
        for way in begin:
            treated = coarse.treated(way.choices)
            self._race(line, treated, len(treated), len(treated))
        compared, least = (round(part * self._estimates) for part in (_COMPARED, least))
        self._race(line, rough, compared, least)
        if not self._fitting():
            self._look_at_smallest(line, rough)
        self._vary(line, coarse)

    def _vary_later(self, line: Line, coarse: Coarse) -> None:
        """Look at the best runs with another choice in one later dimension."""
        for way in self._fitting()[:_BEGIN]:
            shifted = coarse.shifted(way.choices)
            self._race(line, shifted, min(self._estimates, len(shifted)), len(shifted))

    def _settle(self, line: Line, rough: Sequence[Rough]) -> None:
        """Choose the run to take; look at further combinations if none fits as a whole plan."""
        self._choose()
        if self._found.taken is None and self._fitted:  # the whole plans hold more
            self._race(line, rough, self._estimates)
            self._choose()

    def _race(self, line: Line, rough: Sequence[Rough], most: int, least: int = 0) -> None:
        """Estimate the most promising combinations, until none is expected to be faster.

        Args:
            line: the line that they edit.
            rough: the combinations.
            most: estimates that may be made.
            least: estimates that are made in any case.
        """
        waiting, made = _by_ordering(rough), 0

        def able() -> Iterator[Rough]:
            return (own for order, each in waiting.items() if (own := self._first(order, each)))

        def is_enough(first: Rough) -> bool:
            if made >= most or self._watch.is_over:
                return True
            return made >= least and self._expected.hoped(first) >= self._best_seconds()

        def look(first: Rough) -> None:
            nonlocal made
            self._expect(line, first, waiting)
            waiting[first.ordering].remove(first)
            made += self._estimate(line, first)

        look_closer(able, self._expected.costs, is_enough, look)

    def _expect(
        self, line: Line, first: Rough, waiting: Mapping[Ordering, Sequence[Rough]]
    ) -> None:
        """Let other processes estimate what is likely to be estimated after ``first``."""
        if helpers := self._runs.helpers:
            likely = islice(self._expected.guessed(first, waiting), _GUESSES * helpers)
            self._runs.expect("estimate", [line.edited(_edits(own)) for own in likely])

    def _first(self, ordering: Ordering, waiting: Sequence[Rough]) -> Rough | None:
        """Return the fastest combination of an ordering that is expected to fit, if any."""
        if ordering not in self._expected and self._refusals[ordering] >= _REFUSALS:
            return None
        return self._expected.first(ordering, waiting)

    def _look_at_smallest(self, line: Line, rough: Sequence[Rough]) -> None:
        """Estimate the combinations that are expected to hold the least."""
        smallest = sorted(rough, key=lambda own: (self._expected.costs(own)[1], own.seconds))
        for each in smallest[:_SMALLEST]:
            if not self._watch.is_over:
                self._estimate(line, each)

    def _vary(self, line: Line, coarse: Coarse) -> None:
        """Vary the best run as long as that makes it faster and estimates are left."""
        varied: Way | None = None
        while self._estimates > 0 and self._fitting() and self._fitting()[0] is not varied:
            varied = self._fitting()[0]
            around = coarse.around(varied.choices)
            self._found.combinations += len(around)
            self._race(line, around, min(self._estimates, max(4, self._estimates // 2)))

    def _estimate(self, line: Line, rough: Rough) -> bool:
        """Estimate a combination and learn from it; return whether that took work."""
        chosen = line.edited(_edits(rough))
        if chosen.key in self._ways:
            return False
        try:
            known = self._runs.estimate(chosen)
        except ValueError as error:
            self._found.refused.setdefault(str(error).split("\n")[0])
            self._refusals[rough.ordering] += 1
            return False
        self._estimates -= 1
        self._made += 1
        best = min(self._best_seconds(), known.seconds if known.fits else inf)
        self._watch.show(
            self._made / self._all,
            "" if best == inf else f"{TIME.write(best)} an iteration",
        )
        self._ways[chosen.key] = Way(rough.choices, chosen, known)
        self._roughs[chosen.key] = rough
        self._expected.learn(rough, known, mean=True)
        return True

    def _fitting(self) -> list[Way]:
        return by_seconds(way for way in self._ways.values() if way.known.fits)

    def _best_seconds(self) -> float:
        return min((way.known.seconds for way in self._fitting()), default=inf)

    def _choose(self, *, whole: bool = True) -> None:
        """Look closer at the run to take, until it still is that run.

        Args:
            whole: whether its whole plan is made at last.
        """
        found = self._found

        def to_take() -> list[Way]:
            return [way for way in best_first(self._fitting()) if way.known.level != "plan"]

        def is_enough(way: Way) -> bool:
            return way.known.level != "unsearched" and (not whole or self._is_too_long(way))

        look_closer(to_take, costs, is_enough, self._look_at)
        best = best_of(self._fitting())
        found.taken = best
        found.candidate = None if best is None else self._planned.get(best.choices)
        self._sort()

    def _look_at(self, way: Way) -> None:
        """Look closer at an estimated run: search its plan of few microbatches, or plan in full."""
        if way.known.level == "unsearched":
            self._learn(way, self._runs.searched(way.line))
            return
        known, self._planned[way.choices] = self._runs.plan(way.line)
        self._learn(way, known)

    def _is_too_long(self, way: Way) -> bool:
        """Return whether the whole plan of a run would have too many passes."""
        request = self._runs.candidate(way.line).request
        chunks = request.chunks or request.traits.chunks
        return 3 * request.ranks * request.units * chunks > _MOST_PASSES  # F, B and W, about

    def _sort(self) -> None:
        """Sort the runs that were looked at."""
        self._found.ways = self._fitting()
        self._found.too_large = [way for way in self._ways.values() if not way.known.fits]
        self._found.too_large.sort(key=lambda way: way.known.seconds)

    def _learn(self, way: Way, known: Known) -> None:
        """Keep what is known of a run now, and expect it of others with its stages and order."""
        self._ways[way.line.key] = way._replace(known=known)
        self._fitted |= way.known.fits
        self._expected.learn(self._roughs[way.line.key], known)


def _edits(rough: Rough) -> Choice:
    """Return the edits of a combination."""
    return tuple(edit for choice in rough.choices for edit in choice)


def _by_ordering(rough: Iterable[Rough]) -> Mapping[Ordering, list[Rough]]:
    """Return the combinations of every ordering, the fastest first."""
    found: dict[Ordering, list[Rough]] = {}
    for each in sorted(rough, key=lambda own: (own.seconds, own.peak)):
        found.setdefault(each.ordering, []).append(each)
    return found
