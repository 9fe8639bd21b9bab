"""The time of a pair is that of its passes if they take turns as the executor lets them."""

from collections.abc import Sequence

import pytest
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.parallel.turns import Turns
from megatron.schedules.pair_time import (
    PAUSES,
    SWITCHES,
    FindsSteps,
    InTurns,
    PairStep,
    PairSteps,
    Pauses,
    Sends,
    Switches,
    Waits,
    Works,
    joined_time,
)
from megatron.schedules.passes import BEGINNERS, PAUSING, PassKind

DURATIONS = st.integers(1, 8).map(float)
AXES = st.sampled_from(["tensor", "context"])


@st.composite
def steps_of_a_pass(draw: st.DrawFn) -> tuple[PairStep, ...]:
    """Work, pauses, and collectives that the pass waits for at once, later or never."""
    steps: list[PairStep] = []
    waiting: list[int] = []
    sent = 0
    for what in draw(st.lists(st.sampled_from("wpcbsa"), max_size=12)):
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


def timed(passes: Sequence[Sequence[PairStep]], *, pauses: bool = False) -> float:
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
        turns.run(lambda: play(first), lambda: play(second), pauses=pauses)
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
    """Where other collectives slow the passes, the pair is longer by the same share."""
    passes = dict(zip(kinds, (one, other), strict=True))
    first, second = sorted(kinds, key=BEGINNERS.index)
    expected = timed([passes[first], passes[second]], pauses=all(k in PAUSING for k in kinds))
    in_turns = [
        InTurns(kind, slower * alone(own), 0.0, 0, known(own)) for kind, own in passes.items()
    ]
    assert joined_time(*in_turns) == pytest.approx(slower * expected)
    assert joined_time(*reversed(in_turns)) == pytest.approx(slower * expected)
    work = sum(step.seconds for own in passes.values() for step in own if isinstance(step, Works))
    assert work <= expected + 1e-9


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


def layers(number: int) -> tuple[PairStep, ...]:
    return tuple(
        Waits(step.number + 2 * at) if isinstance(step, Waits) else step
        for at in range(number)
        for step in LAYER
    )


def test_two_passes_that_pause_hide_all_collectives_but_the_first_ones() -> None:
    """If both handed over at collectives alone, the norms would meet: nothing hides there."""
    steps = layers(10)
    forward, backward = (InTurns(kind, alone(steps), 0.0, 0, known(steps)) for kind in PAUSING)
    work = 2 * 10 * 6.1
    assert joined_time(forward, backward) < work + 4.0
    unpaused = tuple(step for step in steps if step is not PAUSES)
    assert timed([unpaused, unpaused]) > work + 10 * 2.0
