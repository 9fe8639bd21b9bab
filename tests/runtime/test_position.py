"""Another thread can tell at any time where a rank is in its program."""

from contextlib import suppress

from megatron.runtime.position import Position, awaited_in, last_pass_of
from megatron.schedules.lower import Run, Wait, lower
from megatron.schedules.make_plan import make_plan
from megatron.schedules.passes import Pass

PROGRAM = lower(make_plan("1f1b", "vocab-2", 2, 4))


def test_it_tells_the_instruction_and_the_last_pass_at_every_step() -> None:
    position, done = Position(), list[Pass]()
    row = position.begin(PROGRAM, 1)
    assert row == PROGRAM.rows[1]
    for at, step in enumerate(row):
        position.at = at
        assert position.instruction == step
        assert last_pass_of(position.row[: position.at]) == (done[-1] if done else None)
        assert awaited_in(position.instruction) == (step.comm if isinstance(step, Wait) else None)
        if isinstance(step, Run):
            done.append(step.item)
    position.at = len(row)
    assert position.instruction is None
    assert last_pass_of(position.row[: position.at]) == done[-1]


def test_everything_that_a_rank_does_shows_as_progress() -> None:
    position, seen = Position(), list[object]()
    for _ in range(2):
        for at in range(len(position.begin(PROGRAM, 0))):
            position.at = at
            seen.append(position.progress)
    with position.within("evaluation"):
        seen.append(position.progress)
    position.enter("iteration 3")
    seen.append(position.progress)
    assert len(set(seen)) == len(seen)


def test_a_phase_ends_with_its_context_even_by_an_error() -> None:
    position = Position()
    position.enter("iteration 3")
    with suppress(KeyError), position.within("save", may_last=True):
        assert (position.phase, position.may_last) == ("save", True)
        raise KeyError
    assert (position.phase, position.may_last) == ("iteration 3", False)
