"""Lists the launches, messages and memory that code on the ``meta`` device would need on a GPU.

The recorder sees every operation of PyTorch. Memory is counted by storages: a storage counts from
the operation that makes it until nothing refers to it, as on a GPU whose allocator gives memory
back at once. Process groups that move nothing list the collectives (``ListedGroup``). A lane, which
on a GPU runs work while passes run, lists its work and runs it at once (``ListedLane``).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.parallel.lanes import Pending
from megatron.planning.count.launches import launch_of, tensors_of
from megatron.simulator.costs.count import (
    HOST_WAIT,
    PAUSE,
    Await,
    Begin,
    Collective,
    CollectiveKind,
    CountedAxis,
    InSlot,
    Step,
    Work,
)

T = TypeVar("T")

META: Final = torch.device("meta")
_HOST: Final = torch.device("cpu")

GRANULE: Final = 512
"""Bytes; PyTorch's allocator on CUDA rounds sizes up to multiples of them."""


_READ: Final = torch.ops.aten._local_scalar_dense.default
"""The operation by which the host reads a number of the device."""

_COPY: Final = torch.ops.aten._to_copy.default
"""The operation by which a tensor comes to another device."""

ONLY_IN_PLACE: Final = {"aten::_fused_sgd_", "aten::addmm.dtype_out", "aten::baddbmm.dtype_out"}
"""Operations that only change their arguments; a PyTorch since 2.8 cannot run them on ``meta``."""


class _Slot:
    """Bytes in a slot of captured passes; attributes as in ``InSlot``, since the part began."""

    def __init__(self) -> None:
        self.held = 0
        self.begin()

    def begin(self) -> None:
        """Begin a part."""
        self.before = self.most = self.held
        self.lasting = self.launches = self.graphs = 0

    def part(self, name: str) -> InSlot:
        """Return the part so far."""
        left, peak = self.held - self.before, self.most - self.before
        return InSlot(name, left, peak, self.lasting, self.launches, self.graphs)


class Recorder(TorchDispatchMode):
    """Records the work of code that runs in its context.

    Attributes:
        held: bytes of all storages that were made in the context and are still there.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # TorchDispatchMode has no types
        self.held = self.begun = self._begun_before = 0
        self._before = self._moved = 0
        self._heights: list[int] = []
        self._taken: list[int] = []
        self._given: list[int] = []
        self._steps: list[Step] = []
        self._parts: list[Work] = []
        self._in_lane: list[Collective] | None = None
        self._storages: dict[int, _Seen] = {}
        self._slots: dict[str, _Slot] = {}
        self._slot: tuple[_Slot, bool] | None = None

    @contextmanager
    def recording(self) -> Iterator[list[Work]]:
        """Record work; the yielded list gets the parts of the work in order, at least one."""
        self._parts = []
        self._begin_part()
        yield self._parts
        self.divide()

    def divide(self) -> None:
        """End a part of the recorded work, and begin another."""
        heights = tuple(held - self._before for held in self._heights)
        parts = [slot.part(name) for name, slot in self._slots.items()]
        self._parts.append(
            Work(
                tuple(self._steps),
                left=self.held - self._before,
                peak=max((0, *heights)),
                moved=self._moved,
                heights=heights,
                slots=tuple(own for own in parts if own != InSlot(own.slot)),
                taken=tuple(self._taken),
                given=tuple(self._given),
            )
        )
        self._begin_part()

    def _begin_part(self) -> None:
        self._before, self._begun_before = self.held, self.begun
        self._heights, self._taken, self._given = [], [], []
        self._moved = 0
        self._steps = []
        for slot in self._slots.values():
            slot.begin()

    @contextmanager
    def in_slot(self, name: str, *, captured: bool) -> Iterator[None]:
        """Return a context whose tensors lie in a slot, and not in the memory of all passes.

        Args:
            name: of the slot.
            captured: whether a graph holds the work; otherwise the tensors are lasting ones.
        """
        assert self._slot is None, "a graph makes no slot"
        self._slot = self._slots.setdefault(name, _Slot()), captured
        self._slot[0].graphs += captured
        try:
            yield
        finally:
            self._slot = None

    def may_move(self, size: int) -> None:
        """Note a storage of ``size`` bytes that may wait on the host for its backward."""
        self._moved += _allocated(size)

    def taking(self, make: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Return a room that ``make`` makes; its bytes are taken from rooms, and not held.

        A room that is made in a slot belongs to the slot.
        """
        if self._slot is not None:
            return make()
        before, made = self.held, len(self._heights)
        room = make()
        self._taken.append(bytes_of(room))
        self.lasts(room)
        assert self.held == before, "all that stays is the room"
        del self._heights[made:]
        return room

    def give(self, room: Sequence[Tensor]) -> None:
        """Note that a room waits for another unit."""
        self._given.append(bytes_of(room))

    def lasts(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of tensors no longer as held: the rank counts what is made once."""
        for tensor in tensors:
            own = self._storages[tensor.untyped_storage()._cdata]
            self.held -= own.held
            own.held = 0

    def communicate(self, collective: Collective) -> None:
        """Note a collective."""
        if self._in_lane is None:
            self._steps.append(collective)
        else:
            self._in_lane.append(collective)

    def beside(self, work: Callable[[], T]) -> T:
        """Run ``work`` of a lane; its launches are counted at the step that begins this work."""
        self._in_lane = []
        try:
            return work()
        finally:
            self._steps.append(Begin(tuple(self._in_lane)))
            self._in_lane = None
            self.begun += 1

    def await_lane(self, number: int) -> None:
        """Note that the pass waits for work of the lane: for all up to the one that has a number.

        The numbers begin with 1, in the order in which the work began. If it began before this
        part, the pass waits for no work that has begun in this part.
        """
        since = self.begun - self._begun_before
        self._steps.append(Await(min(self.begun - number, since)))

    def pause(self) -> None:
        """Note that the pass pauses."""
        self._steps.append(PAUSE)

    def let_the_host_wait(self) -> None:
        """Note that the host waits for the device."""
        self._steps.append(HOST_WAIT)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise PyTorch would import its compiler, which takes 2 seconds."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and list it.

        If code asks whether a condition holds, the host waits, and the answer is yes: a loop that
        goes on under a condition runs as often as the code allows. The host also waits for a
        tensor that it copies from the device; the copy has no values either.
        """
        kwargs = kwargs or {}
        if function is _COPY and args[0].is_meta and kwargs.get("device") == _HOST:
            self.let_the_host_wait()
            return args[0]
        if function is _READ and args[0].is_meta and args[0].dtype == torch.bool:
            self.let_the_host_wait()
            return True
        inputs = tensors_of((args, kwargs))
        if _is_of_the_host(inputs, kwargs):
            return function(*args, **kwargs)
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        result = None
        if function.name() not in ONLY_IN_PLACE:
            result = function(*args, **kwargs)
        launch = launch_of(function, args, kwargs, result)
        if launch is not None:
            self._steps.append(launch)
            if self._slot is not None and self._slot[1]:
                self._slot[0].launches += 1
        for tensor in tensors_of(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:  # else a view of an argument
                self._see(storage)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._storages:
            return
        size = _allocated(storage.nbytes())
        if self._slot is not None:
            free_in_slot = self._see_in_slot(*self._slot, key, size)
            self._storages[key] = _Seen(weakref.ref(storage, free_in_slot), 0)
            return

        def free(_: object) -> None:
            self.held -= self._storages.pop(key).held

        own = _Seen(weakref.ref(storage, free), size)
        self._storages[key] = own
        self.held += own.held
        self._heights.append(self.held)

    def _see_in_slot(
        self, slot: _Slot, captured: bool, key: int, size: int
    ) -> Callable[[object], None]:
        """Count a storage in a slot; return what to call when it is freed."""
        if captured:
            slot.held += size
            slot.most = max(slot.most, slot.held)
        else:
            slot.lasting += size

        def free(_: object) -> None:
            del self._storages[key]
            slot.held -= size * captured

        return free


@dataclass
class _Seen:
    """A storage that is still there, and its bytes in ``Recorder.held``."""

    storage: weakref.ref[torch.UntypedStorage]
    held: int


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that an allocator gives for the storages of tensors."""
    storages = {own._cdata: own for own in (tensor.untyped_storage() for tensor in tensors)}
    return sum(_allocated(own.nbytes()) for own in storages.values())


def _allocated(size: int) -> int:
    return -(-size // GRANULE) * GRANULE


def _is_of_the_host(inputs: list[Tensor], kwargs: Any) -> bool:
    """Return whether an operation computes on the host, such as the starts of documents."""
    devices = {tensor.device.type for tensor in inputs}
    return devices == {"cpu"} and "device" not in kwargs


@dataclass(frozen=True)
class _ListedResult(Generic[T]):
    """A result of a lane; like a real result, it keeps the inputs until someone waits for it."""

    recorder: Recorder
    work: Callable[[], T]
    value: T
    number: int

    def wait(self) -> T:
        self.recorder.await_lane(self.number)
        return self.value


class ListedLane:
    """A lane that runs its work at once, and lists where work begins and where a pass waits."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        """Run ``work`` now."""
        with torch.no_grad():
            value = self._recorder.beside(work)
        return _ListedResult(self._recorder, work, value, self._recorder.begun)

    def close(self) -> None:
        """Do nothing: there are no resources."""


class _ListedWork(dist.Work):
    """A communication that moves nothing; like PyTorch's, it keeps its tensors until the wait."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        """Let go of the tensors."""
        self._tensors = []
        return True


class ListedGroup(dist.ProcessGroup):
    """A process group without its other ranks; it lists the messages that would be sent."""

    def __init__(self, recorder: Recorder, axis: CountedAxis, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # PyTorch's stub knows one of two
        self._recorder = recorder
        self._axis: CountedAxis = axis

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> _ListedWork:
        """Send to another rank; on a context axis all ranks do so at once, along a ring."""
        kind: CollectiveKind = "shift" if self._axis in ("context", "context_ring") else "send"
        return self._list(kind, tensors, tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _ListedWork:
        """Receive from another rank."""
        return _ListedWork(tensors)

    def broadcast(  # type: ignore[override]  # of PyTorch's overloads, only the one that is called
        self, tensors: list[Tensor], options: Any
    ) -> _ListedWork:
        """Send the root's tensor to all ranks."""
        return self._list("broadcast", tensors, tensors)

    def reduce(  # type: ignore[override]  # see broadcast
        self, tensors: list[Tensor], options: Any
    ) -> _ListedWork:
        """Compute the sum on the root."""
        return self._list("reduce", tensors, tensors)

    def allreduce(  # type: ignore[override]  # see broadcast
        self, tensors: list[Tensor], options: Any
    ) -> _ListedWork:
        """Compute the sum or maximum on all ranks, in place."""
        return self._list("all_reduce", tensors, tensors)

    def all_gather_single(  # type: ignore[override]  # see broadcast
        self, output: Tensor, tensor: Tensor, options: Any
    ) -> _ListedWork:
        """Gather the tensors of all ranks on all ranks."""
        return self._list("all_gather", [output], [output, tensor])

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, options: Any) -> _ListedWork:
        """Compute the sum, and give every rank its part."""
        return self._list("reduce_scatter", [tensor], [output, tensor])

    def all_to_all_single(  # type: ignore[override]  # see broadcast
        self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int], options: Any
    ) -> _ListedWork:
        """Send every rank its part; the larger of leaving and arriving bytes decides the time."""
        more = max(output, tensor, key=Tensor.numel)
        return self._list("all_to_all", [more], [output, tensor])

    # What PyTorch 2.12 and older versions call; the ignored errors are those of ``broadcast``.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def _list(self, kind: CollectiveKind, whole: list[Tensor], used: list[Tensor]) -> _ListedWork:
        size = sum(tensor.numel() * tensor.element_size() for tensor in whole)
        ranks = 2 if kind == "send" else self.size()
        self._recorder.communicate(Collective(kind, self._axis, ranks, size))
        return _ListedWork(used)
