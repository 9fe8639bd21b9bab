"""Two passes take turns: in an order that they alone decide, and never both at a time."""

import threading

import pytest

from megatron.parallel.turns import Turns


def played(first: int, second: int) -> list[str]:
    """Return what two passes do that hand over so many times each."""
    turns, done = Turns(), list[str]()

    def work(name: str, times: int) -> None:
        for part in range(times):
            done.append(f"{name}{part}")
            turns.hand_over()
        done.append(f"{name} ends")

    turns.run(lambda: work("F", first), lambda: work("B", second))
    return done


def test_each_goes_on_while_the_other_waits() -> None:
    assert played(2, 2) == ["F0", "B0", "F1", "B1", "F ends", "B ends"]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (0, 2, ["F ends", "B0", "B1", "B ends"]),
        (2, 0, ["F0", "B ends", "F1", "F ends"]),
        (1, 3, ["F0", "B0", "F ends", "B1", "B2", "B ends"]),
        (0, 0, ["F ends", "B ends"]),
    ],
)
def test_a_pass_that_is_over_lets_the_other_go_on(
    first: int, second: int, expected: list[str]
) -> None:
    assert played(first, second) == expected


def test_without_a_pair_nobody_is_waited_for() -> None:
    turns = Turns()
    turns.hand_over()
    turns.run(lambda: None, lambda: None)
    turns.hand_over()


def test_the_second_pass_stays_in_the_thread_of_the_caller() -> None:
    turns, found = Turns(), dict[str, int]()

    def note(name: str) -> None:
        found[name] = threading.get_ident()

    turns.run(lambda: note("F"), lambda: note("B"))
    assert found["B"] == threading.get_ident() != found["F"]


@pytest.mark.parametrize("which", [0, 1])
def test_an_error_of_one_ends_the_other_at_its_turn(which: int) -> None:
    turns, done = Turns(), list[str]()

    def fail() -> None:
        turns.hand_over()
        raise ValueError("no tokens")

    def work() -> None:
        turns.hand_over()
        turns.hand_over()
        done.append("over")

    with pytest.raises(ValueError, match="no tokens"):
        turns.run(*((fail, work) if which == 0 else (work, fail)))
    assert not done
    turns.hand_over()
    assert played(1, 1) == ["F0", "B0", "F ends", "B ends"]


def in_pauses(passes: str, other: str, *, pauses: bool = True) -> str:
    """Return what two passes do; a dot is a pause, and a bar a collective of the pass."""
    turns, done = Turns(), list[str]()

    def work(parts: str) -> None:
        for part in parts:
            if part == ".":
                turns.pause()
            elif part == "|":
                turns.hand_over()
            else:
                done.append(part)

    turns.run(lambda: work(passes), lambda: work(other), pauses=pauses)
    return "".join(done)


def test_the_second_pass_stays_a_turn_behind_so_that_no_two_short_parts_meet() -> None:
    """Here n is the norm between the sum of a layer and the gathering for the next layer."""
    assert in_pauses("|a.b|n|a.b|n|a.b|", "|A.B|N|A.B|N|A.B|") == "abAnBaNbAnBaNbAB"


def test_without_pauses_a_pass_hands_over_at_collectives_alone() -> None:
    assert in_pauses("|a.b|n|a.b|", "|A.B|N|A.B|", pauses=False) == "abABnNabAB"


def test_a_pause_outside_of_a_pair_does_nothing() -> None:
    turns = Turns()
    assert not turns.runs
    turns.pause()
    turns.run(lambda: None, lambda: None, pauses=True)
    turns.pause()
    assert not turns.runs
