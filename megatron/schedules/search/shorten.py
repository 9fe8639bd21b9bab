"""Shorten a plan within limits of memory: try several ways and keep the best.

A block orders its passes as if a new microbatch came after every interval, and as if passes took
the times of the block. But in the warm-up and the cool-down there is no new microbatch after every
interval, and real costs are not the times of the block. So other orders are tried. The given plan
is one of the trials, so the returned plan is never longer. (arXiv 2405.15362, section 4.2, moves F,
B and W ahead by a greedy rule; ``fill_gaps``, one of the trials, uses this rule.)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from random import Random
from typing import Final

from megatron.schedules.costs import UNIT_COSTS, Costs, Time
from megatron.schedules.graph import Graph
from megatron.schedules.held import Held, held_changes, peak_held
from megatron.schedules.passes import PassKind
from megatron.schedules.plan import Plan
from megatron.schedules.search.automatic import greedy
from megatron.schedules.search.cool_down import cooled_down
from megatron.schedules.search.fill_gaps import fill_gaps
from megatron.schedules.search.justify import (
    Scheduled,
    justify,
    planned,
    scheduled,
    scheduled_by,
    to_the_left,
)
from megatron.schedules.search.keys_from_plan import keys_from_plan
from megatron.schedules.search.lengthen import Lengthening, Target
from megatron.schedules.search.list_schedule import Problem, Rows, Rule
from megatron.schedules.search.watch import PLACEMENT, Watch

EFFORT: Final = 600_000
"""Passes that all trials of a plan with a split backward may place; this takes some seconds."""
EFFORT_SEARCHED: Final = 2_000_000
"""The same for a schedule that is ``searched``, whose plan depends on the search alone."""
EFFORT_GUIDED: Final = 2_300_000
"""The same for a ``LARGE`` plan that follows another plan; at most ``MOST_GUIDED`` placements of
all passes."""
MOST_GUIDED: Final = 14
FEWEST_PLACEMENTS: Final = 10
"""Times that all passes of a plan with a split backward may be placed at least, however many they
are: the trials that gain the most take nine, at p = 128 more than ``EFFORT``."""
FEWEST_OF_GUIDE: Final = 5
"""The same for a plan that is only the guide for another one."""
LARGE: Final = 20_000
"""A plan of more passes cannot try everything: it begins with the trials that gain the most."""
EFFORT_FUSED: Final = 12_000
"""Effort for a plan without W, which has nothing to fill gaps with: its block is nearly always
the best."""
EFFORT_TURNS: Final = 400_000
"""The same for a plan without W but with several chunks, whose order leaves something to gain: the
block and the gaps filled pass by pass are two starts, each with half of it."""
EFFORT_QUICK: Final = 60_000
"""The most effort for a plan that is only looked at. Its time is within about 1 % of the time that
the whole effort finds."""
PATIENCE: Final = 50
"""The search ends after this many trials in a row without a shorter plan."""

_SLACKS: Final = ((0.5, 0.0), (1.0, 0.0, 1.0), (0.0, 0.0), (0.25, 0.25))
_FIRST_SLACKS: Final = ((1.0, 0.0, 1.0), (0.5, 0.0))
"""The slacks that gain the most for each pass that they place."""
_REGULAR_SLACKS: Final = _FIRST_SLACKS[1:]
"""The slacks of ``_FIRST_SLACKS`` that leave a steady state which can be repeated."""
_GREEDY_SLACKS: Final = tuple(
    (slack, filler, warm_up)
    for slack, filler in ((0.35, 0.7), (0.5, 1.0), (0.75, 1.0), (0.75, 0.7), (0.85, 1.0))
    for warm_up in (0.0, 0.1, 0.25, 0.4, 0.5, 0.55, 0.7, 0.85)
)
"""Slacks that list scheduling by urgency tries: ``slack``, ``filler_slack``, ``warm_up_slack``."""
_LEFT_BY_GREEDY: Final = 0.75
"""Share of the effort left by trials by urgency to other trials, for large or lengthened plans."""
_EPSILON: Final = 1e-9


def shorten(
    plan: Plan,
    costs: Costs = UNIT_COSTS,
    limits: Sequence[Held] | None = None,
    kept: float = 1.0,
    searched: bool = False,
    without: Plan | None = None,
    is_guide: bool = False,
    target: Target | None = None,
    watch: Watch | None = None,
    quick: bool = False,
) -> Plan:
    """Return the shortest plan found with the passes of ``plan``.

    Plans are compared by span, the longest time between a rank's first start and last end.

    Args:
        plan: a checked plan.
        costs: durations.
        limits: for every rank, the most that it may hold; at least its peak in ``plan``, which is
            also the default.
        kept: share of a microbatch's activations that stays from B to W.
        searched: whether to start also from plans of list scheduling by urgency, which needs no
            block.
        without: the shortened plan of the same pipeline without vocabulary passes, if the new plan
            should follow that plan.
        is_guide: whether the plan is made only to be the argument ``without`` of a later call. If
            so, its last fillers (passes that no other pass waits for) are not kept for the
            cool-down, because the vocabulary passes of the later plan need the idle time there.
        target: the size to which the plan will be lengthened, if at all. Plans are then compared by
            their span after lengthening.
        watch: ends the search when its time is up, and shows its progress.
        quick: whether to limit the search to ``EFFORT_QUICK``.
    """
    search = _Search(plan, costs, limits, kept, searched, is_guide)
    search.watch = Watch() if watch is None else watch
    if target is not None:
        search.lengthen_to(target)
    if without is not None:
        search.follow(without, costs)
    if quick:
        search.hurry()
    best = search.best(search.rows(plan))
    return replace(plan, rows=tuple(search.graph.plan_row(row) for row in best.rows))


class _Search:
    """The trials of one plan."""

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        limits: Sequence[Held] | None,
        kept: float,
        searched: bool,
        is_guide: bool,
    ) -> None:
        self.keys: list[list[list[float]]] = []
        self.watch = Watch()
        self.lengthening: Lengthening | None = None
        self._plan, self._searched, self._is_guide = plan, searched, is_guide
        self.graph = Graph(plan, costs)
        peaks = [peak_held(plan, row, kept) for row in plan.rows]
        allowed = [
            Held(*map(max, peak, limit)) for peak, limit in zip(peaks, limits or peaks, strict=True)
        ]
        changes = [held_changes(plan, item, kept) for item in self.graph.passes]
        self._problem = Problem(self.graph, changes, allowed)
        self._ideal = Problem(Graph(plan, _evened(plan, costs)), changes, allowed)
        self._passes = sum(map(len, plan.rows))
        self._least = (FEWEST_OF_GUIDE if is_guide else FEWEST_PLACEMENTS) * self._passes
        self._is_large = self._passes > LARGE
        patient = searched and not (is_guide and self._is_large)
        self._left = max(EFFORT_SEARCHED if patient else EFFORT, self._least)
        if not plan.split_backward:
            self._left = EFFORT_FUSED if plan.chunks == 1 else EFFORT_TURNS
        self._effort = self._left

    def lengthen_to(self, target: Target) -> None:
        """Look for a plan that is good when lengthened.

        A ``searched`` plan, too, then gets ``EFFORT`` only.
        """
        self.lengthening = Lengthening(self.graph, target)
        self._left = self._effort = min(self._left, max(EFFORT, self._least))

    def follow(self, without: Plan, costs: Costs) -> None:
        """Let trials take the order of another plan, which has no vocabulary passes.

        Call this after ``lengthen_to``.
        """
        self.keys = [
            keys_from_plan(self._plan, self.graph, without, costs, held) for held in (0.0, 1.0)
        ]
        if self._is_large and self.lengthening is None:
            guided = min(EFFORT_GUIDED, MOST_GUIDED * self._passes)
            self._left = self._effort = max(self._left, guided)

    def hurry(self) -> None:
        """Limit the search to ``EFFORT_QUICK``; call this after ``follow``."""
        self._left = self._effort = min(self._left, max(EFFORT_QUICK, self._least))

    def rows(self, plan: Plan) -> Rows:
        """Return the numbered rows of a plan."""
        return [self.graph.row(rank, row) for rank, row in enumerate(plan.rows)]

    def best(self, base: Rows) -> Scheduled:
        """Return the shortest schedule of all trials that the effort allows."""
        start = scheduled(self._problem, base)
        best = self._judged(start)
        floor = self._floor()
        idle = 0
        for made, found in enumerate(self._trials(start), 1):
            judged = self._judged(found, best.span)
            better = _shorter(judged, best, _EPSILON * floor)
            idle = 0 if better else idle + 1
            if better:
                best = judged
            without_luck = made / (made + PATIENCE + 1 - idle)
            share = max(1 - max(self._left, 0) / self._effort, without_luck)
            self.watch.show(share, f"bubble {_idle(best, floor)}")
            if best.span <= floor * (1 + _EPSILON) or idle > PATIENCE:
                break
        return best

    def _judged(self, found: Scheduled, below: float = inf) -> Scheduled:
        """Return ``found`` with the span that counts: with a target, its span when lengthened.

        If the lengthened span cannot be less than ``below``, the returned span is only a lower
        bound, which is not less than ``below`` either.
        """
        longer = self.lengthening
        if longer is None:
            return found
        span = longer.least(found.span)
        if span <= below:
            span = longer.span(found.rows, found.starts, found.span)
        return found._replace(span=span, end=found.end + span - found.span)

    def _affords(self, placements: int, leave: float = 0.0) -> bool:
        """Whether the search may place all passes so many times and then has ``leave`` effort left.

        If so, the effort of these placements is spent.
        """
        if self._left - leave < placements * self._passes or self.watch.is_over:
            return False
        self._left -= placements * self._passes
        self.watch.did(PLACEMENT * placements * self._passes)
        return True

    def _quarter(self) -> Callable[[int], bool]:
        """Return ``_affords`` for trials that may take a quarter of the effort that is left."""
        leave = self._left * 3 / 4
        return lambda placements: self._affords(placements, leave)

    def _floor(self) -> float:
        """Return the time that the busiest rank works: no schedule is shorter."""
        return max(self._work()) if self.lengthening is None else self.lengthening.work

    def _work(self) -> list[float]:
        """Return the time that every rank works, before the plan is lengthened."""
        work = [0.0] * self._plan.ranks
        for rank, time in zip(self.graph.ranks, self.graph.times, strict=True):
            work[rank] += time * self.graph.microbatches
        return work

    def _trials(self, start: Scheduled) -> Iterator[Scheduled]:
        """Yield schedules until the effort is spent, the quick ones first."""
        starts = [start]
        found = [start, to_the_left(self._problem, start, 0.0)]  # always once, whatever the effort
        yield found[-1]
        if not self._plan.split_backward and not self.graph.followed_by:  # W fills gaps as well
            starts.append(fill_gaps(self._problem, start))
            found.append(starts[-1])
            yield found[-1]
        self._affords(len(starts))
        has_time = not self._follows or self.lengthening is not None
        cools_down = self._plan.split_backward and not self._is_guide and has_time
        cooled = [self._cooled_down(start)] if cools_down else []
        for schedule in self._others(starts):
            found.append(schedule)
            yield schedule
        found += cooled
        yield from cooled
        if self._plan.split_backward:
            yield from self._shaken(min(found, key=lambda s: (s.span, s.end)))

    @property
    def _follows(self) -> bool:
        """Whether to follow the guide first: the plan has one, and is too large for all trials."""
        return self._is_large and bool(self.keys)

    def _others(self, starts: list[Scheduled]) -> Iterator[Scheduled]:
        """Yield the schedules made from ``starts`` and from further starts, with all slacks."""
        ways = [self._by_urgency, self._followed]
        for way in reversed(ways) if self._follows else ways:
            for more in way(starts[0]):
                starts += more
                yield more[-1]
        if self._follows:
            slacks = _FIRST_SLACKS if self.lengthening is None else _REGULAR_SLACKS
            yield from self._justified(starts[-1:], slacks)
        for base in starts if self._plan.split_backward else ():
            for slack in (1.0, 0.0):
                if self._affords(3):
                    yield from self._evened(base, slack)
        yield from self._justified(starts, _SLACKS)

    def _justified(
        self, starts: Sequence[Scheduled], every: Sequence[Sequence[float]]
    ) -> Iterator[Scheduled]:
        """Yield every start pushed to and fro with each of the given slacks."""
        for slacks in every:
            for base in starts:
                if self._affords(2 * len(slacks)):
                    yield justify(self._problem, base, slacks)

    def _followed(self, start: Scheduled) -> Iterator[list[Scheduled]]:
        """Yield, one by one, the schedules that follow the plan without vocabulary passes."""
        for keys in self.keys:
            if self._affords(1):
                yield [scheduled_by(self._problem, start.rows, Rule(0.5, keys=keys))]

    def _by_urgency(self, start: Scheduled) -> Iterator[list[Scheduled]]:
        """Yield the best two schedules by urgency alone, the better one last."""
        if not self._searched:
            return
        found: list[Scheduled] = []
        scarce = self._is_large and (self._is_guide or bool(self.keys))
        limited = scarce or self.lengthening is not None
        least = _LEFT_BY_GREEDY * self._effort if limited else 0
        for slacks in _GREEDY_SLACKS:
            if not found or (self._left > least and self._affords(1)):
                rows = greedy(self._plan, self._problem, *slacks)
                found.append(scheduled(self._problem, rows))
        yield sorted(found, key=lambda s: -s.span)[-2:]

    def _cooled_down(self, start: Scheduled) -> Scheduled:
        """Return the best schedule whose last fillers give way, or ``start``.

        These trials may take a quarter of the effort that is left, and other trials keep all of
        theirs.
        """
        effort = self._left
        even = scheduled(self._ideal, start.rows)
        starts = planned(self._ideal, even.rows, even.starts)
        found: dict[float, Scheduled] = {start.span: start}
        for trial in cooled_down(self._problem, start.rows, starts, self._work(), self._quarter()):
            found.setdefault(trial.span, trial)
        best = [found[span] for span in sorted(found)[:3]]
        best += [justify(self._problem, s, (0.0, 0.0)) for s in best if self._affords(4)]
        self._left = effort
        return min(best, key=lambda s: (s.span, s.end))

    def _shaken(self, current: Scheduled) -> Iterator[Scheduled]:
        """Yield schedules made by perturbing the best schedule at random (iterated local search).

        All ranks draw the same random numbers, because they must find the same plan.
        """
        random = Random(0)
        mean = sum(self.graph.times) / len(self.graph.times)
        while self._affords(5):
            spread = mean * random.choice([0.5, 1, 2, 4, 8])
            starts = planned(self._problem, current.rows, current.starts)
            # Sorted, because passes of a kind run in the order of microbatches.
            keys = [sorted(time + random.gauss(0, spread) for time in row) for row in starts]
            rule = Rule(random.choice([0, 0.25, 0.5, 0.75, 1]), keys=keys)
            shaken = scheduled_by(self._problem, current.rows, rule)
            slacks = random.choice([(0.5, 0.0), (0.0, 0.0), (0.5, 0.5), (1.0, 0.0), (0.25,)])
            found = justify(self._problem, shaken, slacks)
            if found.span <= current.span * (1 + _EPSILON):
                current = found
            yield found

    def _evened(self, start: Scheduled, slack: float) -> Iterator[Scheduled]:
        """Yield schedules that are shortened first for even costs, then for the real costs."""
        ideal = to_the_left(self._ideal, scheduled(self._ideal, start.rows), slack)
        even = justify(self._ideal, ideal, [slack])
        if self._affords(2):
            even = justify(self._ideal, even, [slack])
        real = scheduled(self._problem, even.rows)
        yield real
        for slacks in ((0.0, 0.0), (0.5, 0.0)):
            if self._affords(4):
                yield justify(self._problem, real, slacks)


def _shorter(found: Scheduled, best: Scheduled, tolerance: float) -> bool:
    """Whether ``found`` has a shorter span than ``best``, or the same span and an earlier end."""
    if abs(found.span - best.span) <= tolerance:
        return found.end < best.end - tolerance
    return found.span < best.span


def _idle(best: Scheduled, work: float) -> str:
    """Return, as text, the share of the span in which the busiest rank idles."""
    return f"{1 - work / best.span:.1%}" if 0 < best.span < inf else "not known"


def _evened(plan: Plan, costs: Costs) -> Costs:
    """Return costs with the same times of F, B and W on all ranks, and without communication.

    Blocks are made for even costs, and a plan that is short for even costs is often the best start
    for the real costs.
    """
    times: dict[PassKind, list[float]] = {}
    graph = Graph(plan, costs)
    for item, time in zip(graph.passes, graph.times, strict=True):
        times.setdefault(item.kind, []).append(time)
    mean = {kind: sum(all_) / len(all_) for kind, all_ in times.items()}
    if "W" in mean:
        third = (mean["F"] + mean["B"] + mean["W"]) / 3
        mean |= {"F": third, "B": third, "W": third}
    even: dict[PassKind, Time] = dict(mean.items())
    return Costs(even)
