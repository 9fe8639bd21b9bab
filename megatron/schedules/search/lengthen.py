"""Lengthen a short plan: repeat its steady state until there are enough microbatches.

Between warm-up and cool-down a plan repeats the same passes again and again. So a search need not
place every microbatch of a long iteration. The search makes a short plan, and then a part of its
middle, the *window*, is repeated.

A window has P microbatches: on every rank it has P passes of each kind and chunk. So after a window
the rank is in the same state as before, P microbatches later, and holds as much memory as before.
So copies of the window may follow one another, with higher numbers of microbatches. Only the input
layer's passes IF and IB are *loose*: in the middle of a short plan they may run ahead of the other
passes or fall behind, because no other pass waits for them at once. The copies of loose passes are
spread evenly over the copies of the window.

In a copy, a rank may have to wait longer than in the short plan. So a window is judged by a plan
with a few copies, whose times show how long each further copy takes.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import inf
from typing import Final, NamedTuple

from megatron.schedules.costs import Costs
from megatron.schedules.graph import Graph
from megatron.schedules.passes import PassKind
from megatron.schedules.plan import Plan
from megatron.schedules.search.list_schedule import Rows
from megatron.schedules.timing import longest_span, walk, working

PERIODS: Final = (1, 2, 3, 4, 6, 12)
"""Microbatches of a window that are tried, if the chunks of a rank do not take turns.

All divide the last: a short plan that lacks a multiple of it can be lengthened by any of them."""

_LOOSE: Final[tuple[PassKind, ...]] = ("IF", "IB")
_CUTS: Final = tuple(share / 100 for share in range(25, 75, 5))
"""Where windows are looked for, as shares of the busiest rank's row."""
_JUDGED: Final = 3
"""Number of windows of a plan that are judged, the windows with the least time per microbatch."""
_COPIES: Final = 4
"""Further copies of a window by which it is judged."""
_REACH: Final = 4
"""Lengths of a window by which the window of a rank may lie apart from the others' in time."""
_EPSILON: Final = 1e-9


class Window(NamedTuple):
    """A part of every rank's row that can be repeated.

    Attributes:
        microbatches: the number P of microbatches in the window.
        begins: for every rank, the index in its row of the window's first pass.
        ends: for every rank, the index in its row of the first pass after the window.
    """

    microbatches: int
    begins: tuple[int, ...]
    ends: tuple[int, ...]


class _Repeated(NamedTuple):
    """Rows with copies of a window.

    Attributes:
        rows: for every rank the numbers of its passes.
        pairs: for every rank the first passes of its pairs; empty: there are none.
    """

    rows: Rows
    pairs: Sequence[Collection[int]]


class Target(NamedTuple):
    """The size to which a short plan is lengthened.

    Attributes:
        microbatches: microbatches of the lengthened plan.
        periods: the numbers of microbatches that a window may have.
    """

    microbatches: int
    periods: Sequence[int]


class Lengthening:
    """Judges short plans by the time that they take when lengthened, and lengthens them.

    Attributes:
        work: time that the busiest rank works in a lengthened plan: no lengthened plan is shorter.
    """

    def __init__(self, graph: Graph, target: Target, pairs: Sequence[Collection[int]] = ()) -> None:
        """Take the numbered passes of the short plans, and the target of the lengthening.

        ``pairs`` are for every rank the first passes of its pairs; empty: there are none.
        """
        self._graph = graph
        self._pairs = pairs
        self._lacking = target.microbatches - graph.microbatches
        self._periods = [p for p in target.periods if self._lacking % p == 0]
        self._loose = {n for n, item in enumerate(graph.passes) if item.kind in _LOOSE}
        work = [0.0] * (1 + max(graph.ranks))
        for rank, time, waits in zip(graph.ranks, graph.times, graph.waits, strict=True):
            work[rank] += time - waits if pairs else time  # pairs may hide every wait
        self._busiest = work.index(max(work))
        self._interval = max(work)
        self.work = self._interval * target.microbatches

    def span(self, rows: Rows, starts: Sequence[Sequence[float]], span: float) -> float:
        """Return the span of a short plan when lengthened; infinity if no window can be repeated.

        Args:
            rows: the rows of the short plan.
            starts: the start of every pass.
            span: the span of the short plan.
        """
        return self._best(rows, starts, span)[0]

    def rows(self, rows: Rows, starts: Sequence[Sequence[float]], span: float) -> _Repeated | None:
        """Return the lengthened rows, or ``None`` if no window can be repeated; see ``span``."""
        _, window = self._best(rows, starts, span)
        if window is None:
            return None
        return self._repeated(rows, window, self._lacking // window.microbatches)

    def least(self, span: float) -> float:
        """Return the least time that a short plan with this span can take when lengthened."""
        return span + self._lacking * self._interval

    def _best(
        self, rows: Rows, starts: Sequence[Sequence[float]], span: float
    ) -> tuple[float, Window | None]:
        """Return the shortest lengthened span and its window."""
        best: tuple[float, Window | None] = (inf, None)
        for window in self._windows(rows, starts):
            expected = self._expected(rows, window)
            if expected < best[0]:
                best = expected, window
            if expected <= self.least(span) * (1 + _EPSILON):
                break
        return best

    def _expected(self, rows: Rows, window: Window) -> float:
        """Return the span with all copies of a window, estimated from a plan with a few copies."""
        wanted = self._lacking // window.microbatches
        copies = min(_COPIES, wanted)
        repeated = self._repeated(rows, window, copies)
        run = walk(
            self._graph.with_microbatches(self._graph.microbatches + copies * window.microbatches),
            *repeated,
        )
        if run.stuck:
            return inf
        span = longest_span(map(working, run.starts, run.ends))
        longest = max(
            self._last_copy(window, copies, *rank)
            for rank in zip(rows, window.begins, repeated.rows, run.starts, strict=True)
        )
        return span + (wanted - copies) * longest

    def _last_copy(
        self,
        window: Window,
        copies: int,
        row: Sequence[int],
        begin: int,
        repeated: Sequence[int],
        starts: Sequence[float],
    ) -> float:
        """Return the time of a rank between the begins of the last two copies of its window.

        The same pass begins both copies. Copies may differ in length, because loose passes are
        spread.
        """
        m = self._graph.microbatches
        number, first = divmod(row[begin], m)
        longer = m + copies * window.microbatches
        last = number * longer + first + copies * window.microbatches
        times = (starts[repeated.index(last - i * window.microbatches)] for i in range(2))
        return next(times) - next(times)

    def _windows(self, rows: Rows, starts: Sequence[Sequence[float]]) -> list[Window]:
        """Return the windows that take the least time per microbatch in the short plan."""
        pairs = self._pairs or [()] * len(rows)
        ranks = [
            _Rank(self._graph, self._loose, *row) for row in zip(rows, starts, pairs, strict=True)
        ]
        busiest = ranks[self._busiest].starts
        windows = {
            _window_at(ranks, busiest[int(cut * len(busiest))], period): None
            for period in self._periods
            for cut in _CUTS
        }

        def pace(window: Window) -> tuple[float, int]:
            times = (
                row[end] - row[begin]
                for row, begin, end in zip(starts, window.begins, window.ends, strict=True)
            )
            excess = max(times) / window.microbatches - self._interval
            return max(excess, _EPSILON * self.work), window.microbatches

        return sorted((window for window in windows if window is not None), key=pace)[:_JUDGED]

    def _repeated(self, rows: Rows, window: Window, copies: int) -> _Repeated:
        """Return rows with ``copies`` more of the window and all microbatches numbered anew."""
        longer = self._graph.microbatches + copies * window.microbatches
        followers = set(self._graph.followed_by.values())
        found, pairs = [], []
        for rank, (begin, end) in enumerate(zip(window.begins, window.ends, strict=True)):
            word = self._word(rank, rows[rank])
            loose = [n for n in sorted(self._loose) if self._graph.ranks[n] == rank]
            middle = _copied(word[begin:end], loose, window.microbatches, copies, followers)
            following = Counter[int]()
            numbered, firsts = [], set[int]()
            for letter in (*word[:begin], *middle, *word[end:]):
                number = letter if letter >= 0 else ~letter
                item = number * longer + following[number]
                numbered.append(item)
                following[number] += 1
                if letter < 0:
                    firsts.add(item)
            found.append(numbered)
            pairs.append(firsts)
        return _Repeated(found, pairs if self._pairs else ())

    def _word(self, rank: int, row: Sequence[int]) -> list[int]:
        """Return a row without its microbatches: number n of a pass, ~n of a pair's first one."""
        m = self._graph.microbatches
        if not self._pairs:
            return [item // m for item in row]
        firsts = self._pairs[rank]
        return [~(item // m) if item in firsts else item // m for item in row]


class _Rank:
    """The row of a rank without its loose passes, in which a window is looked for.

    Attributes:
        starts: the start of every pass.
        kinds: number of different kinds of passes in the row, counted per chunk.
    """

    def __init__(
        self,
        graph: Graph,
        loose: set[int],
        row: Sequence[int],
        starts: Sequence[float],
        pairs: Collection[int],
    ) -> None:
        m = graph.microbatches
        self._places = [place for place, item in enumerate(row) if item // m not in loose]
        self.starts = [starts[place] for place in self._places]
        word = [row[place] // m for place in self._places]
        numbers = sorted(set(word))
        self.kinds = len(numbers)
        followers = set(graph.followed_by.values())
        self._begins = [
            number not in followers and (place == 0 or row[place - 1] not in pairs)
            for place, number in zip(self._places, word, strict=True)
        ]
        # The sums at two places are equal if and only if, between these places, equally many passes
        # of every kind have run: the sum is a number in base 2 m + 1, and each digit is the count
        # of one kind less the count of the last kind.
        weights = {number: (2 * m + 1) ** i for i, number in enumerate(numbers[:-1])}
        weights[numbers[-1]] = -sum(weights.values())
        self._sums = [0]
        for number in word:
            self._sums.append(self._sums[-1] + weights[number])

    def window(self, time: float, period: int) -> tuple[int, int] | None:
        """Return the begin and end, in the row, of the window that begins nearest to ``time``.

        Args:
            time: time near which the window should begin.
            period: microbatches of the window.
        """
        centre = bisect_left(self.starts, time)
        length = period * self.kinds
        last = len(self._places) - length - 1
        for distance in range(_REACH * length):
            for begin in (centre - distance, centre + distance):
                if (
                    0 <= begin <= last
                    and self._sums[begin] == self._sums[begin + length]
                    and self._begins[begin]
                    and self._begins[begin + length]
                ):
                    return self._places[begin], self._places[begin + length]
        return None


def _window_at(ranks: Sequence[_Rank], time: float, period: int) -> Window | None:
    """Return the window that begins near ``time`` on every rank, or ``None`` if there is none."""
    places = []
    for rank in ranks:
        place = rank.window(time, period)
        if place is None:
            return None
        places.append(place)
    begins, ends = zip(*places, strict=True)
    return Window(period, begins, ends)


def _copied(
    word: Sequence[int], loose: Sequence[int], period: int, copies: int, followers: set[int]
) -> list[int]:
    """Return a window's passes, given by their numbers, and ``copies`` more of each.

    Args:
        word: the numbers in the window; ~n for the first pass of a pair. A pair whose other pass is
            spread comes apart.
        loose: the numbers that may be in the window more or less often than ``period``.
        period: microbatches of the window.
        copies: how many copies follow the window.
        followers: numbers of passes before which no loose pass may be put.
    """
    counts = Counter(word)
    spread = [number for number in loose if counts[number] != period]
    kept = [
        ~letter if letter < 0 and behind in spread else letter
        for letter, behind in zip(word, (*word[1:], None), strict=True)
        if letter not in spread
    ]
    middle = kept * (copies + 1)
    before: list[list[int]] = [[] for _ in middle]
    for number in spread:
        total = counts[number] + copies * period
        for i in range(total):
            place = (2 * i + 1) * len(middle) // (2 * total)
            while middle[place] in followers or (place and middle[place - 1] < 0):
                place -= 1
            before[place].append(number)
    if not spread:
        return middle
    return [number for put, kept in zip(before, middle, strict=True) for number in (*put, kept)]


def lengthened(plan: Plan, costs: Costs, target: Target) -> Plan | None:
    """Return ``plan`` with its steady state repeated, or ``None`` if that is impossible.

    If times are very uneven, a vocabulary pass that is spread over the repetitions may come before
    a pass that it waits for. Such a plan would deadlock, so ``None`` is returned instead.

    Args:
        plan: a plan that runs, of fewer microbatches.
        costs: durations.
        target: the size to which ``plan`` is lengthened.
    """
    graph = Graph(plan, costs)
    rows, pairs = graph.rows(plan), graph.pairs(plan) if plan.pairs else ()
    run = walk(graph, rows, pairs)
    span = longest_span(map(working, run.starts, run.ends))
    longer = Lengthening(graph, target, pairs).rows(rows, run.starts, span)
    if longer is None:
        return None
    long = graph.with_microbatches(target.microbatches)
    if walk(long, *longer).stuck:
        return None
    return long.with_rows(replace(plan, microbatches=target.microbatches), *longer)
