"""A job that cannot go on ends on all ranks, one of which says why; one that can goes on."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from megatron.training.failure import GRACE_SECONDS
from megatron.training.guard import hang_detector
from megatron.training.guard.hang_detector import LOST_ANSWER, HangDetector
from megatron.training.guard.neighbours import Neighbours, News
from megatron.training.guard.roll_call import RollCall
from megatron.training.rendezvous import Rendezvous

ANSWER_SECONDS = 0.3


class Ended(BaseException):
    """A rank has ended, with a reason or, silently, with an exit status."""


@pytest.fixture(autouse=True)
def ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that end raise ``Ended``, and hurry."""

    def end(how: object) -> NoReturn:
        raise Ended(how)

    monkeypatch.setattr(hang_detector, "end_with_reason", end)
    monkeypatch.setattr(hang_detector, "end_silently", end)
    monkeypatch.setattr(hang_detector, "LOST_ANSWER", ANSWER_SECONDS)
    monkeypatch.setattr(hang_detector, "SLOW_ANSWER", 2 * ANSWER_SECONDS)
    monkeypatch.setattr(hang_detector, "POLL_SECONDS", 0.02)


class Job:
    """Ranks that are threads, each with its detector."""

    def __init__(self, size: int, seconds: float) -> None:
        self.store = dist.HashStore()
        self.told = [Rendezvous(self.store, rank, size) for rank in range(size)]
        self.detectors = [HangDetector(rendezvous, seconds) for rendezvous in self.told]
        self.calls = [RollCall(rendezvous) for rendezvous in self.told]

    def look(self, *ranks: int, turns: int = 1) -> list[object]:
        """Let ranks look at the same time, each at least so often, until all have or one has ended.

        Returns:
            How each of them ended.
        """
        left, over = dict.fromkeys(ranks, turns), threading.Event()

        def look(rank: int) -> object:
            try:
                while not over.is_set():
                    self.detectors[rank].look(self.calls[rank])
                    left[rank] -= 1
                    if max(left.values()) <= 0:
                        over.set()
            except Ended as ended:
                left[rank] = 0
                # a rank that was about to call when the others stopped to look got no answer
                return None if over.is_set() else ended.args[0]
            return None

        with ThreadPoolExecutor(len(ranks)) as threads:
            return list(threads.map(look, ranks))


def one_speaks(ended: list[object], silent: object = 0) -> str:
    """What the one rank said that spoke; the others ended silently."""
    spoken = [how for how in ended if isinstance(how, str)]
    assert len(spoken) == 1, ended
    assert ended.count(silent) == len(ended) - 1, ended
    return spoken[0]


def enter(job: Job, **places: Any) -> None:
    for detector in job.detectors:
        detector._position.enter("iteration 7", **places)


def test_ranks_that_make_progress_never_call() -> None:
    job = Job(3, seconds=60.0)
    assert job.look(0, 1, 2, turns=3) == [None] * 3
    assert job.store.num_keys() == 0


def test_all_end_when_none_has_made_progress() -> None:
    job = Job(3, seconds=1e-6)
    enter(job)
    job.look(0)  # sees the progress of the phase
    reason = one_speaks(job.look(0, 1, 2, turns=5))
    assert reason.startswith("error: no rank has made progress")


def test_a_phase_that_may_last_keeps_the_job_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_detector, "LASTING", 1e6)
    job = Job(2, seconds=0.05)
    enter(job)
    job.detectors[1]._position.enter("the save of iteration 7", may_last=True)
    assert job.look(0, 1, turns=8) == [None, None]


@pytest.mark.parametrize("may_last", [False, True])
def test_a_rank_that_does_not_answer_is_named(may_last: bool) -> None:
    """Also in a phase that may last, such as a save."""
    job = Job(3, seconds=1e-6)
    enter(job, may_last=may_last)
    reason = one_speaks(job.look(0, 2, turns=8))
    assert reason.startswith("error: rank 1 was lost")


def test_a_lost_connection_is_asked_about_at_once() -> None:
    job = Job(3, seconds=3600.0)
    assert job.detectors[2].find_lost() > ANSWER_SECONDS
    reason = one_speaks(job.look(0, 2, turns=8))
    assert reason.startswith("error: rank 1 was lost")


def test_a_connection_that_was_lost_though_all_answer_ends_nothing() -> None:
    job = Job(3, seconds=3600.0)
    job.detectors[2].find_lost()
    assert job.look(0, 1, 2, turns=8) == [None] * 3


def test_another_that_has_said_why_keeps_the_word() -> None:
    """The others of its machine end without a fault, and the caller with one."""
    job = Job(3, seconds=3600.0)
    assert job.told[1].takes_the_word()
    job.detectors[0].find_lost()
    caller, other = job.look(0, 2, turns=8)
    assert caller == 1
    assert str(other).startswith("error: rank 1 was lost")


def test_each_other_machine_tells_the_reason_to_its_torchrun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(3, seconds=3600.0)
    job.detectors[0].find_lost()
    names = iter(["a", "b"])
    monkeypatch.setattr(hang_detector, "_machine", lambda: next(names))
    first, other = job.look(0, 2, turns=8)
    assert first == other


def test_without_the_store_a_rank_gives_up_alone() -> None:
    class Gone(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("connection reset by peer")

    detector = HangDetector(Rendezvous(Gone(), 3, 8), seconds=0.05)
    detector._position.enter("iteration 7")
    with pytest.raises(Ended, match=r"\[rank 3\] iteration 7; no progress for 0 s; the store"):
        detector.watch()
    assert detector.find_lost() == 0.0


def test_a_rank_that_has_lost_another_waits_for_the_neighbours_verdict() -> None:
    """The store would print C++ if it were asked after rank 0 has ended."""
    told = Rendezvous(dist.HashStore(), 3, 8)
    neighbours = Neighbours(told)
    neighbours.news[0] = News("lost", 0, 1)
    detector = HangDetector(told, 1e-6, neighbours)
    detector._is_alone = True
    assert detector.find_lost() > ANSWER_SECONDS
    detector.look(RollCall(told))
    detector.look(RollCall(told))
    assert not RollCall(told).is_called()
    neighbours.news[0] = News("told", 0, 0)
    with pytest.raises(Ended, match="1"):
        detector.find_lost()
    with pytest.raises(dist.DistError, match="has ended"):
        detector.look(RollCall(told))


@pytest.mark.parametrize("listens", [False, True])
def test_a_store_that_has_ended_with_torchrun_is_not_asked(
    listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's client would print 20 lines of C++ before the rank saves."""

    class AskedError(Exception):
        """Somebody has asked the store."""

    class Store(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            raise AskedError

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        detector = HangDetector(Rendezvous(Store(), 3, 8, connect=Store), seconds=0.05)
        monkeypatch.setattr(os, "getppid", lambda: 1)
        if not listens:
            server.close()
        with pytest.raises(AskedError if listens else Ended):
            detector.watch()


def test_torchrun_has_time_to_tell_of_a_dead_rank_of_its_own_machine() -> None:
    """It ends the others of the machine before they say that the rank is lost."""
    assert LOST_ANSWER >= 10 * GRACE_SECONDS
    assert HangDetector(Rendezvous(dist.HashStore(), 0, 1), 1.0).find_lost() > ANSWER_SECONDS
