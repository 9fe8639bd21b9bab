"""The place of a GPU is the first instruction behind which an event is not over."""

import threading

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
    device = DeviceProgress()
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
    device = DeviceProgress()
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
    device = DeviceProgress()
    issue(Position(device), 0)

    def fails(self: object) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access\nCompile with more checks")

    monkeypatch.setattr(torch.cuda.Event, "query", fails)
    with pytest.raises(DeviceError, match=r"failed: CUDA error: an illegal memory access$"):
        device.place()


def test_a_driver_that_does_not_answer_holds_up_nobody(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, answers = DeviceProgress(), threading.Event()
    issue(Position(device), 0)
    monkeypatch.setattr(device_progress, "PATIENCE", 0.05)
    monkeypatch.setattr(torch.cuda.Event, "query", lambda self: answers.wait())
    with pytest.raises(DeviceError, match="the driver of its GPU does not answer"):
        device.place()
    answers.set()


@needs_gpus
def test_a_real_gpu_is_behind_its_host() -> None:
    device = DeviceProgress()
    position = Position(device)
    torch.cuda._sleep(500_000_000)  # a few tenths of a second
    marked = issue(position, 0)
    found = device.place()
    assert found is not None
    assert found.at == marked[0]
    torch.cuda.synchronize()
    assert device.place() is None
