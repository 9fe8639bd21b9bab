"""The place of a GPU is the first instruction behind which an event is not over."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from cuda_path import needs_gpus

from megatron.runtime import device_progress
from megatron.runtime.device_progress import DeviceError, DeviceProgress
from megatron.runtime.position import Position
from megatron.schedules.lower import Run, Wait, lower
from megatron.schedules.make_plan import make_plan

PROGRAM = lower(make_plan("1f1b", "vocab-2", 2, 4))


class Stream:
    """A GPU's stream: events end in the order in which they were recorded.

    Attributes:
        recorded: events recorded so far.
        done: how many of them are over.
    """

    def __init__(self) -> None:
        self.recorded = 0
        self.done = 0


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    own = Stream()

    class Event:
        number = 0

        def record(self) -> None:
            own.recorded += 1
            self.number = own.recorded

        def query(self) -> bool:
            return self.number <= own.done

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return own


def issue(position: Position, rank: int) -> list[int]:
    """Let the host issue a whole program; return the indices of its passes and waits."""
    row, marked = position.begin(PROGRAM, rank), []
    for at, step in enumerate(row):
        position.at = at
        if isinstance(step, Run | Wait):
            position.issued()
            marked.append(at)
    position.at = len(row)
    return marked


def test_the_gpu_is_at_the_first_instruction_that_it_has_not_finished(stream: Stream) -> None:
    device = DeviceProgress(torch.device("cuda", 0))
    assert device.place() is None
    marked = issue(Position(device), 1)
    for number, at in enumerate(marked):
        stream.done = number
        found = device.place()
        assert found is not None
        assert (found.program, found.at, found.programs) == (PROGRAM, at, 1)
        assert found.row == PROGRAM.rows[1]
    stream.done = len(marked)
    assert device.place() is None


def test_the_gpu_may_be_in_the_program_before(stream: Stream) -> None:
    """Events are used again after two programs, and then stand for the new one."""
    device = DeviceProgress(torch.device("cuda", 0))
    position, done = Position(device), 0
    for programs in range(1, 6):
        marked = issue(position, 0)
        if programs > 1:
            stream.done = done - 1
            found = device.place()
            assert found is not None
            assert (found.programs, found.at) == (programs - 1, marked[-1])
        stream.done = done
        found = device.place()
        assert found is not None
        assert (found.programs, found.at) == (programs, marked[0])
        done += len(marked)


def test_a_gpu_that_has_failed_says_so(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    device = DeviceProgress(torch.device("cuda", 0))
    issue(Position(device), 0)

    def fails(self: object) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access\nCompile with more checks")

    monkeypatch.setattr(torch.cuda.Event, "query", fails)
    with pytest.raises(DeviceError, match=r"failed: CUDA error: an illegal memory access$"):
        device.place()


RUNTIME = """
#include <unistd.h>
int device = -1, answered = 0;
int cudaSetDevice(int number) { device = number; return 0; }
int cudaEventQuery(void *event) {
  if ((long)event == 9) { sleep(5); answered = 1; }
  return device == 1 ? (int)(long)event : 101;
}
"""
"""In place of CUDA's runtime: the handle of an event is the result; 9 waits, as a driver may."""


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    source, library = tmp_path / "runtime.c", tmp_path / "libcudart.so"
    source.write_text(RUNTIME)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    loaded = ctypes.CDLL(str(library))
    monkeypatch.setattr(device_progress, "_runtime", lambda: loaded)
    return loaded


def asked(monkeypatch: pytest.MonkeyPatch, *handles: int) -> DeviceProgress:
    """The progress of GPU 1, whose first events have these handles, and the others 0."""
    left = [*handles]

    class Event:
        def __init__(self) -> None:
            self.cuda_event = left.pop(0) if left else 0

        def record(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    device = DeviceProgress(torch.device("cuda", 1))
    issue(Position(device), 0)
    return device


@pytest.mark.usefixtures("runtime")
def test_cudas_own_function_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the rank's own GPU, not on GPU 0, where a thread begins."""
    assert asked(monkeypatch).place() is None
    found = asked(monkeypatch, 0, 0, 600).place()
    assert found is not None
    marked = issue(Position(), 0)
    assert found.at == marked[2]
    with pytest.raises(DeviceError, match=r"its GPU has failed: CUDA error 700$"):
        asked(monkeypatch, 700).place()


def test_a_driver_that_does_not_answer_holds_up_nobody(
    runtime: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits without Python's lock, or all threads of the rank would wait."""
    device = asked(monkeypatch, 9)
    monkeypatch.setattr(device_progress, "PATIENCE", 0.1)
    with pytest.raises(DeviceError, match="the driver of its GPU does not answer"):
        device.place()
    assert ctypes.c_int.in_dll(runtime, "answered").value == 0


@needs_gpus
def test_a_real_gpu_is_behind_its_host() -> None:
    device = DeviceProgress(torch.device("cuda", 0))
    position = Position(device)
    torch.cuda._sleep(500_000_000)  # a few tenths of a second
    marked = issue(position, 0)
    found = device.place()
    assert found is not None
    assert found.at == marked[0]
    torch.cuda.synchronize()
    assert device.place() is None
