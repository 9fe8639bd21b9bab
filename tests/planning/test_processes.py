"""Other processes: they change no result, tell when they die, and never outlive their parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest

from megatron.commands.whole_process import reader_may_stop_early
from megatron.planning.other_process import Rehearsal
from megatron.planning.processes import Workers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not fork safely")

Made = tuple[int, int]
"""The square of a task, and the process that has made it."""


def squared(task: int) -> Made:
    """Return a square; some tasks are refused, fail, end their process or take long."""
    match task:
        case 100:
            raise ValueError("100: refused")
        case 101:
            raise RuntimeError("101: a mistake")
        case 102:
            os.kill(os.getpid(), signal.SIGKILL)
        case 103:
            time.sleep(60)
    return task * task, os.getpid()


@contextmanager
def pool(processes: int, make: Callable[[int], Made] = squared) -> Iterator[Workers[int, Made]]:
    made = Workers(make, processes)
    try:
        yield made
    finally:
        made.close()


def results(own: Workers[int, Made], tasks: range) -> list[int]:
    """Return all squares; whatever no process has made is made here."""
    return [(own.result(task, task) or squared(task))[0] for task in tasks]


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_results_do_not_depend_on_the_number_of_processes_or_on_guesses(processes: int) -> None:
    with pool(processes) as own:
        assert own.number == (processes if processes > 1 else 0)
        for right in (range(5, 20), range(50, 60), range(0)):  # right, wrong and no guesses
            own.expect({task: task for task in right}, each=4)
            assert results(own, range(5, 20)) == [task * task for task in range(5, 20)]


def test_what_is_expected_is_made_elsewhere_before_it_is_asked_for() -> None:
    begun = time.monotonic()

    def slow(task: int) -> Made:
        time.sleep(0.2)
        return squared(task)

    with pool(3, slow) as own:
        own.expect({task: task for task in range(8)}, each=4)
        time.sleep(1.2)  # this process is busy
        made = [own.result(task, task) for task in range(8)]
        took = time.monotonic() - begun
    places = {own[1] for own in made if own is not None}
    assert None not in made
    assert len(places) == 2  # the third waits for what this process asks for
    assert os.getpid() not in places
    assert took < 1.6, "eight tasks of 0.2 s"


def test_a_task_that_was_not_expected_goes_before_those_that_were() -> None:
    def slow(task: int) -> Made:
        time.sleep(0.1 * (task < 50))
        return squared(task)

    with pool(2, slow) as own:
        own.expect({task: task for task in range(20)}, each=20)
        begun = time.monotonic()
        assert own.result(60, 60) is not None
        assert time.monotonic() - begun < 1.0, "twenty tasks of 0.1 s"


@pytest.mark.parametrize("expected", [False, True])
def test_a_refusal_is_the_same_as_in_one_process(expected: bool) -> None:
    with pool(2) as own:
        if expected:
            own.expect({100: 100})
        with pytest.raises(ValueError, match=r"^100: refused$"):
            own.result(100, 100)
        assert results(own, range(3)) == [0, 1, 4]


def test_another_error_is_left_to_whoever_asks() -> None:
    with pool(2) as own:
        assert own.result(101, 101) is None
        assert results(own, range(3)) == [0, 1, 4]


def test_a_process_that_dies_is_told_and_the_rest_goes_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with reader_may_stop_early(), pool(2) as own:  # a broken pipe would end this process
        assert own.result(102, 102) is None
        assert own.number == 1
        assert "died (exit code -9" in capfd.readouterr().err
        own.expect({task: task for task in range(4)})
        assert results(own, range(4)) == [0, 1, 4, 9]
        assert own.result(102, 102) is None
        assert own.number == 0
        assert own.result(5, 5) is None


def test_processes_that_die_between_two_questions_end_nothing() -> None:
    with reader_may_stop_early(), pool(3) as own:
        for _ in range(2):
            made = own.result(1, 1)
            assert made is not None
            os.kill(made[1], signal.SIGKILL)
            time.sleep(0.1)
            own.expect({2: 2, 3: 3, 4: 4})
        assert results(own, range(6)) == [0, 1, 4, 9, 16, 25]


def rehearsed(*tasks: int) -> Callable[[Rehearsal[int, Made]], None]:
    """Return work that needs the squares of some tasks."""

    def work(rehearsal: Rehearsal[int, Made]) -> None:
        for task in tasks:
            with suppress(ValueError):
                rehearsal.here(task, partial(squared, task))

    return work


def test_what_is_rehearsed_is_made_when_it_is_asked_for() -> None:
    with pool(2) as own:
        asked = own.result(0, 0), own.result(1, 1)
        own.rehearse(rehearsed(2, 3, 100, 4))
        time.sleep(0.5)  # this process is busy
        made = [own.result(task, task) for task in (2, 3)]
        with pytest.raises(ValueError, match=r"^100: refused$"):
            own.result(100, 100)
        made.append(own.result(4, 4))
    places = {one[1] for one in made if one is not None}
    assert [one[0] for one in made if one is not None] == [4, 9, 16]
    assert len(places) == 1
    assert places.isdisjoint({os.getpid(), *(one[1] for one in asked if one is not None)})


def test_a_rehearsal_is_waited_for_while_it_makes_what_is_asked_for() -> None:
    def work(rehearsal: Rehearsal[int, Made]) -> None:
        def slow() -> Made:
            time.sleep(1.0)
            return squared(7)

        rehearsal.here(7, slow)

    with pool(2) as own:
        own.rehearse(work)
        time.sleep(0.5)
        made = own.result(7, 7)
        assert made is not None
        assert made[1] not in {worker.process.pid for worker in own._workers}


def test_a_rehearsal_that_went_astray_changes_nothing() -> None:
    with pool(2) as own:
        own.rehearse(rehearsed(50, 103))
        time.sleep(0.3)
        [lost] = [worker.process for worker in own._rehearsing]
        assert results(own, range(3)) == [0, 1, 4]
        assert not lost.is_alive()


def test_one_process_rehearses_nothing() -> None:
    with pool(1) as own:
        own.rehearse(rehearsed(102))
        assert results(own, range(3)) == [0, 1, 4]


def test_an_interrupt_ends_the_processes() -> None:
    def interrupted(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupted)
    try:
        begun = time.monotonic()
        with pool(2) as own:
            children = [worker.process for worker in own._workers]
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                own.result(103, 103)
        assert time.monotonic() - begun < 20
        assert not any(child.is_alive() for child in children)
    finally:
        signal.signal(signal.SIGALRM, before)


STUBBORN = """
import signal
from megatron.planning.processes import Workers
signal.signal(signal.SIGTERM, signal.SIG_IGN)
own = Workers(lambda task: task, 2)
assert own.result(1, 1) == 1
own.close()
"""


def test_processes_end_though_their_parent_ignores_requests_to_end() -> None:
    subprocess.run([sys.executable, "-c", STUBBORN], check=True, timeout=60)


LARGE = """
from megatron.planning.processes import Workers
own, large = Workers(lambda task: task, 2), bytes(4_000_000)
own.expect({number: large for number in range(4)}, each=4)
assert all(own.result(number, large) == large for number in range(4))
own.close()
"""


def test_tasks_and_results_may_be_larger_than_a_pipe() -> None:
    subprocess.run([sys.executable, "-c", LARGE], check=True, timeout=60)


def test_fewer_processes_do_where_the_system_refuses_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork, left = os.fork, [1]

    def refusing() -> int:
        if not left:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        left.pop()
        return fork()

    monkeypatch.setattr(os, "fork", refusing)
    with pool(3) as own:
        assert own.number == 1
        own.rehearse(rehearsed(2))
        assert results(own, range(4)) == [0, 1, 4, 9]


ORPHANS = """
import os, signal, time
from megatron.planning.processes import Workers
own = Workers(lambda task: time.sleep(0.5), 3)
print(*(worker.process.pid for worker in own._workers), flush=True)
own.expect({1: 1, 2: 2})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_end_if_their_parent_is_killed() -> None:
    job = subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    with job:
        children = [int(pid) for pid in job.stdout.readline().split()]
    assert len(children) == 3
    until = time.monotonic() + 60
    while any(map(_lives, children)):
        assert time.monotonic() < until, "a process waits for a parent that is gone"
        time.sleep(0.1)


def _lives(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait for whoever adopted it."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
