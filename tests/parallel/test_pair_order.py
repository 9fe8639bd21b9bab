"""No real timing of pairs can deadlock, whichever groups their collectives belong to.

Several ranks of one process run random rows of passes by the real ``Turns``. Their collectives are
stand-ins: a rank's call returns at once, and the wait ends when all ranks of the group have issued
the collective of the same number. A group's collectives run one after the other, as NCCL's do. A
scheduler lets one rank at a time go on, in every order that is possible.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from random import Random

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.parallel.turns import Turns

Group = tuple[str, tuple[int, ...]]
"""The axis of a group, and its ranks."""

Work = Sequence[str]
"""What a pass does, in order. The name of an axis is a collective that the pass waits for; ``-`` is
a product, after which a W hands over; ``.`` is a pause. ``~`` before an axis begins a collective
and hands over, ``+`` begins one and goes on. ``w`` waits for the first of those that have begun,
and at its end a pass waits for all."""

Row = Sequence[tuple[Work, ...]]
"""The steps of a rank: a pass, or the two passes of a pair, of which the first begins."""


class DeadlockError(Exception):
    """No rank can go on."""


@dataclass
class Machine:
    """The ranks, of which one runs at a time until it waits for a collective that is not done.

    Attributes:
        groups: for every axis, the groups.
        choose: picks the next of some ranks that can go on.
        pieces: the turns that a plan gives the pairs of a row, by the number of the pair's step.
        issued: for every group and rank, what its collectives are, by their number.
    """

    groups: dict[str, list[tuple[int, ...]]]
    choose: Callable[[Sequence[int]], int]
    pieces: Mapping[int, Sequence[int]] = field(default_factory=dict)
    issued: dict[tuple[Group, int], list[str]] = field(default_factory=lambda: defaultdict(list))

    def group_of(self, axis: str, rank: int) -> Group:
        return axis, next(ranks for ranks in self.groups[axis] if rank in ranks)

    def is_done(self, group: Group, number: int) -> bool:
        """Whether all ranks have issued this collective; one of another name would hang or mix."""
        issued = [self.issued[group, rank] for rank in group[1]]
        if any(len(own) <= number for own in issued):
            return False
        if len({own[number] for own in issued}) > 1:
            raise DeadlockError(f"{group} mixes {[own[number] for own in issued]}")
        return True

    def run(self, rows: Sequence[Row], player: "Callable[[Rank], None]") -> list[list[str]]:
        """Run all rows; return what every rank has done, in order."""
        ranks = [Rank(self, number, row) for number, row in enumerate(rows)]
        threads = [threading.Thread(target=rank.play, args=(player,)) for rank in ranks]
        for thread in threads:
            thread.start()
        try:
            while alive := [rank for rank in ranks if not rank.is_over]:
                ready = [rank.number for rank in alive if rank.can_go_on()]
                if not ready:
                    raise DeadlockError("; ".join(f"{r.number} waits for {r.wants}" for r in alive))
                ranks[self.choose(ready)].step()
        finally:
            for rank in ranks:
                rank.give_up()
            for thread in threads:
                thread.join()
        return [rank.done for rank in ranks]


class Rank:
    """A rank that stops at every wait until the machine lets it go on."""

    def __init__(self, machine: Machine, number: int, row: Row) -> None:
        self.machine, self.number, self.row = machine, number, row
        self.turns, self.done = Turns(), list[str]()
        self.is_over = False
        self.wants: tuple[Group, int] | None = None
        self._gone, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._given_up = False

    def play(self, player: "Callable[[Rank], None]") -> None:
        try:
            self._gone.acquire()
            if not self._given_up:
                player(self)
        except _GivenUpError:
            pass
        finally:
            self.is_over = True
            self._back.release()

    def can_go_on(self) -> bool:
        return self.wants is None or self.machine.is_done(*self.wants)

    def step(self) -> None:
        self.wants = None
        self._gone.release()
        self._back.acquire()

    def give_up(self) -> None:
        if not self.is_over:
            self._given_up = True
            self._gone.release()

    def wait(self, group: Group, number: int) -> None:
        if self._given_up:
            raise _GivenUpError
        self.wants = group, number
        self._back.release()
        self._gone.acquire()
        if self._given_up:
            raise _GivenUpError

    def work(self, name: str, axes: Work) -> None:
        """A pass: at each collective and after each product the other pass of a pair goes on."""
        begun: list[tuple[Group, int]] = []

        def do(at: int, word: str) -> None:
            self.done.append(f"{name}.{at}")
            axis = word.lstrip("~+")
            if axis == ".":
                self.turns.pause()
            elif axis == "w" and begun:
                self.wait(*begun.pop(0))
            elif axis in self.machine.groups:
                group = self.machine.group_of(axis, self.number)
                own = self.machine.issued[group, self.number]
                own.append(f"{name}.{at}")
                begun.append((group, len(own) - 1))
                if word[0] != "+":
                    self.turns.hand_over()
                if word == axis:
                    self.wait(*begun.pop())

        def part(words: Sequence[tuple[int, str]]) -> None:
            for word in words:
                do(*word)

        self.turns.divided([partial(part, words) for words in _parts(axes)])
        for collective in begun:
            self.wait(*collective)


def _parts(work: Work) -> list[list[tuple[int, str]]]:
    """Return the parts of a pass; what begins without a switch belongs to the part after it."""
    found: list[list[tuple[int, str]]] = [[]]
    for at, word in enumerate(work):
        found[-1].append((at, word))
        if word[0] != "+":
            found.append([])
    return found


class _GivenUpError(Exception):
    """The machine has found a deadlock."""


def in_turns(rank: Rank) -> None:
    """Run a row as the executor does."""
    for number, step in enumerate(rank.row):
        works = [partial(rank.work, f"{number}{'ab'[at]}", axes) for at, axes in enumerate(step)]
        if len(works) == 1:
            works[0]()
        else:
            rank.turns.run(*works, pauses=True, pieces=rank.machine.pieces.get(number, ()))


def by_time(rank: Rank) -> None:
    """Run a row with a fault: where passes switch depends on the rank, as it would on the time."""
    if rank.number % 2:
        rank.row = [step[::-1] for step in rank.row]
    in_turns(rank)


Groups = dict[str, list[tuple[int, ...]]]

GRID: Groups = {"tensor": [(0, 1), (2, 3)], "context": [(0, 2), (1, 3)], "experts": [(0, 1, 2, 3)]}
"""Four ranks that run the same row, in three groups each."""

AXES = (*GRID, "-", ".", "w", *(sign + axis for sign in "~+" for axis in GRID))

passes = st.lists(st.sampled_from(AXES), max_size=7).map(tuple)
steps = st.one_of(st.tuples(passes), st.tuples(passes, passes))
rows = st.lists(steps, min_size=1, max_size=6)
turns = st.dictionaries(st.integers(0, 5), st.lists(st.integers(1, 4), min_size=1, max_size=6))


@settings(max_examples=examples(60), deadline=None)
@given(rows, turns, st.integers(0, 2**32))
def test_random_rows_end_in_every_order_of_the_ranks(
    row: Row, pieces: dict[int, list[int]], seed: int
) -> None:
    machine = Machine(GRID, Random(seed).choice, pieces)
    done = machine.run([row] * 4, in_turns)
    assert done[0] == done[1] == done[2] == done[3]
    parts = [len(axes) for step in row for axes in step]
    assert len(done[0]) == sum(parts)


@dataclass
class Order:
    """An order in which ranks go on: it begins as ``given``, and then takes the first that can.

    Attributes:
        given: places among the ranks that can go on.
        others: beginnings of other orders, found on the way.
    """

    given: Sequence[int]
    others: list[list[int]] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)

    def choose(self, ready: Sequence[int]) -> int:
        at = len(self.taken)
        if at < len(self.given):
            self.taken.append(self.given[at])
        else:
            self.others += ([*self.taken, other] for other in range(1, len(ready)))
            self.taken.append(0)
        return ready[self.taken[-1]]


def every_order(
    rows: Sequence[Row], player: Callable[[Rank], None], pieces: Sequence[int] = ()
) -> Iterator[bool]:
    """Yield for every order in which the ranks can go on whether all of them end."""
    beginnings: list[list[int]] = [[]]
    while beginnings:
        order = Order(beginnings.pop())
        try:
            Machine(PAIR_OF_RANKS, order.choose, {0: pieces}).run(rows, player)
            yield True
        except DeadlockError:
            yield False
        beginnings += order.others


PAIR_OF_RANKS: Groups = {"tensor": [(0, 1)], "context": [(0, 1)], "experts": [(0, 1)]}
SMALL = [
    (one, other)
    for one in product(("tensor", "context"), repeat=2)
    for other in [*product(("tensor", "context"), repeat=2), ("-", "experts")]
] + [
    (("+tensor", "+tensor", "-", "w", "-"), ("tensor", ".", "tensor")),
    (("tensor", ".", "~tensor", "-", "w"), ("context", ".", "~tensor", "tensor")),
]


@pytest.mark.parametrize("pieces", [(), (1, 2), (2, 1, 1), (3,)], ids=str)
@pytest.mark.parametrize("step", SMALL, ids=lambda step: "|".join(map("-".join, step)))
def test_small_rows_end_in_every_order(step: tuple[Work, Work], pieces: Sequence[int]) -> None:
    row = [step, (("experts",),)]
    orders = list(every_order([row, row], in_turns, pieces))
    assert len(orders) > 1
    assert all(orders)


def test_switching_by_the_time_is_found() -> None:
    """The same rows hang, or mix collectives, if a rank lets another pass begin."""
    row = [(("tensor", "context"), ("context", "tensor"))]
    assert not any(every_order([row, row], by_time))


def test_unlike_turns_are_found() -> None:
    """Ranks whose plans give a pair other turns mix their collectives."""

    def by_rank(rank: Rank) -> None:
        rank.machine.pieces = {0: (2, 1) if rank.number else ()}
        in_turns(rank)

    row = [(("tensor", "context"), ("context", "tensor"))]
    assert not all(every_order([row, row], by_rank))


def test_waiting_before_issuing_all_is_found() -> None:
    """Two groups: ranks that wait for one before they have issued the other hang."""

    def waits_at_once(rank: Rank) -> None:
        rank.turns.hand_over = lambda: None  # type: ignore[method-assign]
        by_time(rank)

    row = [(("tensor",), ("context",))]
    assert not any(every_order([row, row], waits_at_once))
