"""The time of a pair is that of its passes if they take turns as the executor lets them."""

from collections.abc import Sequence
from itertools import combinations, groupby

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.parallel.turns import Turns
from megatron.schedules.pair_steps import (
    PAUSES,
    SWITCHES,
    FindsSteps,
    PairStep,
    PairSteps,
    Pauses,
    Sends,
    Switches,
    Waits,
    Works,
)
from megatron.schedules.pair_time import InTurns, joined_time, order_of_turns
from megatron.schedules.passes import BEGINNERS, PAUSING, PassKind
from megatron.schedules.turn_order import TurnOrder, searched_turns

DURATIONS = st.integers(1, 8).map(float)
AXES = st.sampled_from(["tensor", "context"])


@st.composite
def steps_of_a_pass(draw: st.DrawFn, most: int = 12) -> tuple[PairStep, ...]:
    """Work, pauses, and collectives that the pass waits for at once, later or never."""
    steps: list[PairStep] = []
    waiting: list[int] = []
    sent = 0
    for what in draw(st.lists(st.sampled_from("wpcbsa"), max_size=most)):
        if what == "w":
            steps.append(Works(draw(DURATIONS)))
        elif what == "p":
            steps.append(PAUSES)
        elif what == "a":
            steps += map(Waits, waiting)
            waiting = []
        else:
            steps.append(Sends(draw(DURATIONS), draw(AXES)))
            steps += [] if what == "b" else [SWITCHES]
            steps += [Waits(sent)] if what == "c" else []
            waiting += [] if what == "c" else [sent]
            sent += 1
    return tuple(steps)


def alone(steps: Sequence[PairStep]) -> float:
    return timed([steps])


def known(steps: tuple[PairStep, ...]) -> FindsSteps:
    found = PairSteps(steps)
    return lambda: found


def timed(
    passes: Sequence[Sequence[PairStep]], *, pauses: bool = False, pieces: Sequence[int] = ()
) -> float:
    """Return the end of passes, of which the first one begins, by the executor's own turns."""
    clock, free = 0.0, dict[str, float]()
    turns = Turns()

    def play(steps: Sequence[PairStep]) -> None:
        nonlocal clock
        ends: list[float] = []
        for step in steps:
            match step:
                case Works(seconds):
                    clock += seconds
                case Sends(seconds, axis, _):
                    free[axis] = max(clock, free.get(axis, 0.0)) + seconds
                    ends.append(free[axis])
                case Waits(number):
                    clock = max(clock, ends[number])
                case Switches():
                    turns.hand_over()
                case Pauses():
                    turns.pause()

    if len(passes) == 1:
        play(passes[0])
    else:
        first, second = passes
        turns.run(lambda: play(first), lambda: play(second), pauses=pauses, pieces=pieces)
    return clock


KINDS: tuple[PassKind, ...] = ("F", "B", "W")


@settings(max_examples=examples(60), deadline=None)
@given(
    one=steps_of_a_pass(),
    other=steps_of_a_pass(),
    kinds=st.sampled_from([("F", "B"), ("F", "W"), ("B", "W"), ("F", "S")]),
    slower=st.sampled_from([1.0, 1.25]),
)
def test_a_pair_takes_as_long_as_its_passes_in_turns(
    one: tuple[PairStep, ...],
    other: tuple[PairStep, ...],
    kinds: tuple[PassKind, PassKind],
    slower: float,
) -> None:
    """The plan may have found better turns for an F and a B than those that ``Turns`` makes.

    Where other collectives slow the passes, the pair is longer by the same share.
    """
    passes = dict(zip(kinds, (one, other), strict=True))
    first, second = sorted(kinds, key=BEGINNERS.index)
    pauses = all(kind in PAUSING for kind in kinds)
    expected = usual = timed([passes[first], passes[second]], pauses=pauses)
    in_turns = [
        InTurns(kind, slower * alone(own), 0.0, 0, known(own)) for kind, own in passes.items()
    ]
    order = order_of_turns(*in_turns)
    assert order == order_of_turns(*reversed(in_turns))
    if order is not None:
        assert kinds == ("F", "B")
        begins, joins = kinds if order.begins == "F" else kinds[::-1]
        expected = timed([passes[begins], passes[joins]], pauses=pauses, pieces=order.pieces)
        assert expected < usual
    assert joined_time(*in_turns) == pytest.approx(slower * expected)
    assert joined_time(*reversed(in_turns)) == pytest.approx(slower * expected)
    work = sum(step.seconds for own in passes.values() for step in own if isinstance(step, Works))
    assert work <= expected + 1e-9


@settings(max_examples=examples(30), deadline=None)
@given(one=steps_of_a_pass(), other=steps_of_a_pass(), data=st.data())
def test_the_turns_of_a_program_stay_at_other_times(
    one: tuple[PairStep, ...], other: tuple[PairStep, ...], data: st.DataObject
) -> None:
    """A program made for other costs runs as it is, even if other turns would be quicker."""
    passes = {"F": one, "B": other}
    in_turns = [InTurns("F", alone(one), 0.0, 0, known(one))]
    in_turns.append(InTurns("B", alone(other), 0.0, 0, known(other)))
    begins, joins = data.draw(st.permutations(["F", "B"]))
    pieces = [len(PairSteps(passes[kind]).pieces) for kind in (begins, joins)]
    cut = data.draw(st.integers(1, pieces[0]))
    rows = tuple(row for row in (cut, pieces[1], pieces[0] - cut) if row)
    order = TurnOrder("F" if begins == "F" else "B", rows)
    expected = timed([passes[begins], passes[joins]], pauses=True, pieces=rows)
    assert joined_time(*in_turns, turns=order) == pytest.approx(expected)
    usual = timed([passes[kind] for kind in sorted(passes, key=BEGINNERS.index)], pauses=True)
    assert joined_time(*in_turns, turns=None) == pytest.approx(usual)
    longer = order._replace(pieces=(*rows, 1))
    assert joined_time(*in_turns, turns=longer) == joined_time(*in_turns)


def test_a_pass_of_which_nothing_is_known_works_all_its_time() -> None:
    steps = (Works(1.0), Sends(2.0, "tensor"), SWITCHES, Waits(0), Works(1.0))
    forward = InTurns("F", 4.0, 2.0, 1, known(steps))
    assert joined_time(forward, InTurns("S", 3.0, 0.0, 0)) == 5.0
    assert joined_time(forward, InTurns("S", 0.0, 0.0, 0)) == 4.0


def test_work_is_slower_while_a_collective_is_under_way() -> None:
    """Work of 3 during a collective of 2.2 is slower by a tenth for so long: 2 and 1 more."""
    sends = (Sends(2.2, "tensor", 0.1), SWITCHES, Waits(0))
    forward = InTurns("F", 2.2, 2.2, 1, known(sends))
    backward = InTurns("B", 3.0, 0.0, 0, known((Works(3.0),)))
    assert joined_time(forward, backward) == pytest.approx(2.2 + 1.0)


LAYER = (
    *(Sends(2.0, "tensor"), SWITCHES, Waits(0), Works(3.0), PAUSES),
    *(Works(3.0), Sends(2.0, "tensor"), SWITCHES, Waits(1), Works(0.1)),
)
"""A collective, two products with a pause between, a collective and a norm."""


def repeated(steps: Sequence[PairStep], collectives: int, number: int) -> tuple[PairStep, ...]:
    """Return the steps of several layers, of which each has so many collectives."""
    return tuple(
        Waits(step.number + collectives * at) if isinstance(step, Waits) else step
        for at in range(number)
        for step in steps
    )


def test_two_passes_that_pause_hide_all_collectives_but_the_first_ones() -> None:
    """If both handed over at collectives alone, the norms would meet: nothing hides there."""
    steps = repeated(LAYER, 2, 10)
    forward, backward = (InTurns(kind, alone(steps), 0.0, 0, known(steps)) for kind in PAUSING)
    work = 2 * 10 * 6.1
    assert joined_time(forward, backward) < work + 4.0
    unpaused = tuple(step for step in steps if step is not PAUSES)
    assert timed([unpaused, unpaused]) > work + 10 * 2.0


def shortest(passes: Sequence[PairSteps]) -> float:
    """Return the end of the quickest of all orders, by the executor's own turns."""
    one, other = (len(own.pieces) for own in passes)
    found = []
    for places in combinations(range(one + other), one):
        played = [int(at not in places) for at in range(one + other)]
        rows = [(own, len(list(row))) for own, row in groupby(played)]
        steps = [passes[rows[0][0]].steps, passes[1 - rows[0][0]].steps]
        found.append(timed(steps, pauses=True, pieces=[length for _, length in rows]))
    return min(found)


@settings(max_examples=examples(30), deadline=None)
@given(one=steps_of_a_pass(most=5), other=steps_of_a_pass(most=5))
def test_no_order_is_quicker_than_the_quickest(
    one: tuple[PairStep, ...], other: tuple[PairStep, ...]
) -> None:
    """The turns that the search returns have all pieces, and take no less than all orders do."""
    steps = PairSteps(one), PairSteps(other)
    swaps, pieces = searched_turns(*steps)
    assert sum(pieces[swaps::2]) == len(steps[0].pieces)
    assert sum(pieces[1 - swaps :: 2]) == len(steps[1].pieces)
    found = timed([one, other][:: -1 if swaps else 1], pauses=True, pieces=pieces)
    assert found >= shortest(steps)


def test_collectives_that_would_meet_are_kept_apart() -> None:
    """A mixture of experts: a short exchange of numbers, and two long exchanges in each layer.

    With the usual turns both passes exchange at the same time, and nothing hides that.
    """
    layer = (
        *(Works(8.0), Sends(0.1, "experts"), SWITCHES, Waits(0), Works(1.0)),
        *(Sends(4.0, "experts"), SWITCHES, Waits(1), Works(9.0)),
        *(Sends(4.0, "experts"), SWITCHES, Waits(2), Works(0.5)),
    )
    backward = (
        *(Works(0.5), Sends(4.0, "experts"), SWITCHES, Waits(0), Works(12.0)),
        *(Sends(4.0, "experts"), SWITCHES, Waits(1), Works(20.0)),
    )
    many, more = repeated(layer, 3, 4), repeated(backward, 2, 4)
    pair = [InTurns("F", alone(many), 0.0, 0, known(many))]
    pair.append(InTurns("B", alone(more), 0.0, 0, known(more)))
    work = sum(step.seconds for step in (*many, *more) if isinstance(step, Works))
    assert timed([many, more]) > 1.05 * work
    assert joined_time(*pair) < 1.005 * work
