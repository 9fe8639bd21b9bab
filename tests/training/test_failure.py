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
from megatron.training.failure import GRACE_SECONDS, SILENT_SECONDS, end_the_job, or_exit, say
from megatron.training.rendezvous import Rendezvous, UserError


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
