"""A lane runs work in order beside its caller, and hands results and errors to whoever waits."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from megatron.parallel.lanes import InlineLane, Lane, StreamLane, ThreadLane, make_lane

CPU = torch.device("cpu")


@pytest.fixture(params=[InlineLane, lambda: ThreadLane("test")], ids=["inline", "thread"])
def lane(request: pytest.FixtureRequest) -> Iterator[Lane]:
    lane = request.param()
    yield lane
    lane.close()


@pytest.fixture
def thread_lane() -> Iterator[ThreadLane]:
    lane = ThreadLane("test")
    yield lane
    lane.close()


def test_work_runs_in_the_order_of_submission(lane: Lane) -> None:
    done: list[int] = []

    def note(number: int) -> int:
        done.append(number)
        return number

    pending = [lane.submit(partial(note, i)) for i in range(50)]
    # Waited for backwards: the order is the lane's, not the waits'.
    assert [p.wait() for p in reversed(pending)] == list(reversed(range(50)))
    assert done == list(range(50))


def test_result_may_be_asked_for_again(lane: Lane) -> None:
    pending = lane.submit(lambda: "result")
    assert [pending.wait(), pending.wait()] == ["result", "result"]


def test_thread_does_not_make_the_caller_wait(thread_lane: ThreadLane) -> None:
    caller_goes_on = threading.Event()
    pending = thread_lane.submit(lambda: caller_goes_on.wait(60))
    caller_goes_on.set()
    assert pending.wait() is True


def test_thread_has_no_autograd(thread_lane: ThreadLane) -> None:
    """It is a mode of each thread: what the caller has switched off is on in a new one."""
    leaf = torch.ones(1, requires_grad=True)
    assert not thread_lane.submit(lambda: (leaf * 2).requires_grad).wait()


def test_error_is_raised_by_the_wait_and_by_no_other(thread_lane: ThreadLane) -> None:
    def fail() -> None:
        raise LookupError("nothing there")

    before, failing, after = (thread_lane.submit(f) for f in (lambda: 1, fail, lambda: 2))
    assert (before.wait(), after.wait()) == (1, 2)
    with pytest.raises(LookupError, match="nothing there"):
        failing.wait()


def submit_until_refused(lane: Lane) -> None:
    """Return by the lane's error: it has closed, and dropped what had not begun."""
    while True:
        lane.submit(lambda: None)


def test_closing_drops_what_has_not_begun() -> None:
    lane, begun, go_on = ThreadLane("test"), threading.Event(), threading.Event()
    ran: list[str] = []

    def slowly() -> None:
        begun.set()
        go_on.wait(60)
        ran.append("first")

    first = lane.submit(slowly)
    lane.submit(lambda: ran.append("second"))
    begun.wait(60)
    closing = threading.Thread(target=lane.close)
    closing.start()
    with pytest.raises(RuntimeError, match="shutdown"):
        submit_until_refused(lane)
    go_on.set()
    closing.join(60)
    first.wait()
    assert ran == ["first"]


def test_a_lane_fits_device_and_group() -> None:
    assert isinstance(make_lane(CPU, 1, "test"), InlineLane)
    lane = make_lane(CPU, 2, "test")
    assert isinstance(lane, ThreadLane)
    lane.close()


@dataclass(frozen=True)
class Result:
    """A result as C1 has it: tensors within a dataclass."""

    total: torch.Tensor
    nothing: None = None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: a lane there is a stream")
def test_stream_lane_orders_work_after_the_caller_and_waits_before_it() -> None:
    device = torch.device("cuda", 0)
    lane = make_lane(device, 2, "test")
    assert isinstance(lane, StreamLane)
    for size in (1 << 22, 1 << 23):
        source = torch.zeros(size, device=device)
        for _ in range(50):  # the lane must not read before these are through
            source += 1

        def add_up(source: torch.Tensor = source) -> Result:
            return Result(source.sum(dtype=torch.float64))

        pending = lane.submit(add_up)
        assert float(pending.wait().total) == 50 * size
    lane.close()
