"""One rank says why a job ends; under torchrun in its error file, else on standard error."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron.training import failure
from megatron.training.exit_signals import ExitSignals
from megatron.training.failure import (
    GRACE_SECONDS,
    SILENT_SECONDS,
    end_silently,
    end_the_job,
    end_with_reason,
    is_lost_connection,
    or_exit,
    say,
)
from megatron.training.rendezvous import DriftError, Rendezvous, UserError


class Ended(BaseException):
    """A rank has ended at once, with the exit code that it has as its argument."""


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds for which a rank waits in vain for torchrun to end it."""
    waited: list[float] = []
    monkeypatch.setattr(failure, "leave_the_word", waited.append)
    return waited


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torchrun expects the reason of a rank that it has started."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    return tmp_path / "error.json"


def fails(error: Exception) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def test_work_without_a_mistake_returns_its_result() -> None:
    assert or_exit(lambda: 5, rank=1) == 5


@pytest.mark.parametrize(
    ("rank", "local_rank", "waited", "printed"),
    [
        (0, 0, [], "error: --lr 0"),
        (4, 0, [3.0], "[rank 4] error: --lr 0"),
        (5, 1, [6.0], "[rank 5] error: --lr 0"),
    ],
)
@pytest.mark.parametrize("error", [ValueError("--lr 0"), OSError("--lr 0")])
def test_ranks_speak_in_their_order(
    error: Exception,
    rank: int,
    local_rank: int,
    waited: list[float],
    printed: str,
    waits: list[float],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        or_exit(fails(error), rank, local_rank, silent_seconds=3.0)
    assert caught.value.code == 2
    assert waits == waited
    assert capsys.readouterr().err == f"{printed}\n"


def test_a_mistake_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        or_exit(lambda: 1 // 0, rank=0)


def test_several_mistakes_have_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        or_exit(fails(ValueError("--a is wrong\n--b too")), rank=0)
    assert capsys.readouterr().err == "error:\n--a is wrong\n--b too\n"


def test_torchrun_reads_the_reason_from_the_error_file(
    error_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``ProcessFailure`` of torch reads it."""
    before = int(time.time())
    say("error: --lr 0")
    found = ProcessFailure(0, 1, 2, str(error_file))
    assert found.error_file_data["message"]["extraInfo"]["py_callstack"] == "\nerror: --lr 0"
    assert before <= found.timestamp <= time.time()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("fault", ["no torchrun", "no folder"])
def test_a_reason_that_torchrun_will_not_print_is_printed(
    fault: str,
    error_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if fault == "no torchrun":
        monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    else:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file / "below" / "a file"))
    say("error: --lr 0")
    assert capsys.readouterr().err == "error: --lr 0\n"
    assert not error_file.exists()


def ends(rendezvous: Rendezvous, error: Exception, monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code with which a rank ends the job."""

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(Ended) as caught:
        end_the_job(rendezvous, error)
    return caught.value.args[0]


@pytest.mark.parametrize(
    ("error", "code", "grace", "printed"),
    [
        (UserError("no such file"), 2, [], "error: no such file\n"),
        (DriftError("rank 1 differs"), 1, [], "error: rank 1 differs\n"),
        (FloatingPointError("loss is nan"), 1, [], "error: loss is nan\n"),
        (RuntimeError("broken"), 1, [GRACE_SECONDS], "[rank 2] failed:\nRuntimeError: broken\n"),
    ],
)
def test_of_all_ranks_that_fail_the_first_speaks(
    error: Exception,
    code: int,
    grace: list[float],
    printed: str,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = dist.HashStore()
    for rank in (2, 0, 1):
        assert ends(Rendezvous(store, rank, 3), error, monkeypatch) == code
    assert waits == [*grace, SILENT_SECONDS, SILENT_SECONDS]
    assert capsys.readouterr().err == printed


@pytest.mark.parametrize(("error", "speaks"), [(UserError("a"), False), (KeyError("b"), True)])
def test_without_a_store_only_what_others_may_not_know_is_told(
    error: Exception,
    speaks: bool,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def gone(self: Rendezvous) -> bool:
        raise dist.DistError("the host of the store has ended")

    monkeypatch.setattr(Rendezvous, "takes_the_word", gone)
    ends(Rendezvous(dist.HashStore(), 1, 2), error, monkeypatch)
    assert bool(capsys.readouterr().err) == speaks
    assert waits == [GRACE_SECONDS if speaks else SILENT_SECONDS]


WAITS = """
import time
from megatron.training.failure import leave_the_word
sleep = time.sleep
def told(seconds):
    print("waits", flush=True)
    sleep(seconds)
time.sleep = told
leave_the_word(60)
print("was not ended")
"""
"""Says when it waits for torchrun to end it, and when it has waited in vain."""


def test_a_rank_that_leaves_the_word_ends_without_a_fault() -> None:
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "waits\n"
        rank.send_signal(signal.SIGTERM)
        assert rank.communicate(timeout=60)[0] == ""
    assert rank.returncode == 0


def test_a_rank_that_is_not_ended_goes_on() -> None:
    before = signal.getsignal(signal.SIGTERM)
    failure.leave_the_word(0.0)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.fixture
def siblings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The markers of three ranks of a machine, of which the second is this one."""
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "1" / "error.json"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a job")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    return [tmp_path / str(rank) / "silent" for rank in range(3)]


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What happens while a rank sleeps, nap by nap; it fails if it sleeps longer."""
    left: list[Callable[[], None]] = []
    monkeypatch.setattr(time, "sleep", lambda _: left.pop(0)())
    return left


def test_the_speaker_waits_until_all_siblings_can_be_ended_without_a_fault(
    siblings: list[Path], naps: list[Callable[[], None]]
) -> None:
    naps += [siblings[2].touch, siblings[2].touch, siblings[0].touch]
    failure._let_others_be_silent(3600.0)
    assert not naps
    assert not siblings[1].exists()


def test_the_speaker_does_not_wait_for_itself_nor_for_ever(
    siblings: list[Path], naps: list[Callable[[], None]]
) -> None:
    siblings[0].touch()
    failure._let_others_be_silent(0.0)
    siblings[2].touch()
    failure._let_others_be_silent(3600.0)
    assert not naps


def test_a_rank_that_no_torchrun_has_started_has_no_siblings(
    naps: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    failure._let_others_be_silent(3600.0)
    assert not naps


def ended(work: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code with which ``work`` ends the process."""

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(Ended) as caught:
        work()
    return caught.value.args[0]


def test_a_silent_end_is_ready_for_the_speaker(
    siblings: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ended(lambda: end_silently(0), monkeypatch) == 0
    assert siblings[1].exists()


def test_an_end_with_a_reason_leaves_it_for_torchrun(
    siblings: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    siblings[0].touch()
    siblings[2].touch()
    assert ended(lambda: end_with_reason("error: rank 3 was lost"), monkeypatch) == 1
    assert "rank 3 was lost" in (siblings[1].parent / "error.json").read_text()


LOST = RuntimeError(
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1"
)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (LOST, True),
        (dist.DistNetworkError("connection reset"), True),
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("broken"), False),
        (KeyError("gloo/transport"), False),
    ],
)
def test_errors_that_only_tell_of_a_lost_rank_are_known(error: Exception, lost: bool) -> None:
    assert is_lost_connection(error) == lost


def test_who_loses_a_connection_asks_who_is_lost_before_it_speaks(
    waits: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rendezvous = Rendezvous(dist.HashStore(), 0, 2)
    assert ended(lambda: end_the_job(rendezvous, LOST, lambda: 45.0), monkeypatch) == 1
    assert waits == [45.0, GRACE_SECONDS]
    assert "Connection closed by peer" in capsys.readouterr().err
    other = Rendezvous(rendezvous.store, 1, 2)
    broken = RuntimeError("broken")
    assert ended(lambda: end_the_job(other, broken, lambda: 45.0), monkeypatch) == 1
    assert waits[2:] == [SILENT_SECONDS]


def test_a_rank_that_torchrun_has_ended_already_ends_at_once_and_well(
    waits: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --exit-signal-handler it has only noted the signal."""
    before = signal.getsignal(signal.SIGTERM)
    ExitSignals(("SIGTERM",))
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        rendezvous = Rendezvous(dist.HashStore(), 0, 2)
        assert ended(lambda: end_the_job(rendezvous, LOST, lambda: 45.0), monkeypatch) == 0
        assert ended(lambda: end_the_job(rendezvous, KeyError("x")), monkeypatch) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "KeyError" in capsys.readouterr().err
    assert waits == [GRACE_SECONDS]
