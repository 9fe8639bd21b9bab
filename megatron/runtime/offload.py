"""Copies of activations to the host and back: the work of O and L, and the hand-over by F.

Autograd keeps tensors for the backward. In the F of a chunk that the program moves, autograd keeps
*handles* instead. All handles of one storage share a ``_Kept``, which has the storage on the
device, or nothing while the storage is on the host. O copies all storages of the F into one buffer
of the host, and releases them when the rank has waited for the copy. L copies them into new memory
of the device, and the rank waits for L before the first pass that reads a handle. From then on only
the handles hold the storages. So the backward frees each storage as soon as it has read it.

The lane runs the copies in order. So an O may write a buffer of the host if it is issued after the
L that reads this buffer. Buffers of an iteration are never given back to the system, only reused:
pinned memory, which a GPU can copy from while it works, takes long to get.

These tensors are not moved: tensors that live longer than a microbatch (parameters, tables of
rotations, the batch), keys and values that later slices of a microbatch read (``SeenKeys``),
tensors that a layer keeps without autograd, and tensors that are on the host already. (One of
PyTorch's kernels of attention has its seed of dropout there.)
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.layers.slices import SeenKeys
from megatron.parallel.lanes import Lane, Pending
from megatron.runtime.batch import DeviceMicrobatch
from megatron.runtime.host_rooms import Rooms, take_all
from megatron.runtime.observer import Observer
from megatron.schedules.lower import Program
from megatron.schedules.needs import Comm
from megatron.schedules.passes import Pass

_ALIGNED: Final = 16
"""Alignment in bytes of a storage within a buffer of the host."""


class _Kept:
    """A storage that the backward reads: all its elements on the device, or ``None``."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.untyped_storage().nbytes() // tensor.itemsize
        self.elements: Tensor | None = tensor.detach().as_strided((size,), (1,), 0)
        self.size, self.dtype = size, tensor.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return self.size * self.dtype.itemsize


class _Handle(NamedTuple):
    """Stands for a tensor that autograd keeps."""

    kept: _Kept
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """Return the tensor, which must be on the device."""
        elements = self.kept.elements
        assert elements is not None, "activations are read while they are on the host"
        return elements.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


Storages = dict[int, _Kept]
"""The storages that an F has left for its backward, by their address."""


class TakesActivations(Protocol):
    """An object that takes the activations that F leaves: ``HostCopies``, or one that counts."""

    def begin(self, units: Sequence[DeviceMicrobatch]) -> None:
        """Begin an iteration over ``units``."""
        ...

    def around(self, item: Pass, keys: SeenKeys | None) -> AbstractContextManager[object]:
        """Return the context of an F; ``keys`` are those that slices of its microbatch share."""
        ...


@contextmanager
def handed_over(
    device: torch.device,
    shared: frozenset[int],
    keys: SeenKeys | None = None,
    seen: Callable[[int], None] = lambda size: None,
) -> Iterator[Storages]:
    """Return a context in which autograd keeps handles, and the storages behind them.

    Args:
        device: where the passes run; tensors elsewhere stay where they are.
        shared: addresses (``storages_of``) of storages that stay where they are.
        keys: keys and values that stay where they are: slices share them, and the F adds to them.
        seen: called with the bytes of every storage that is found.
    """
    found: Storages = {}

    def pack(tensor: Tensor) -> Tensor | _Handle:
        storage = tensor.untyped_storage()
        key = storage._cdata
        stays = key in shared or (keys is not None and key in storages_of(keys.buffers()))
        if stays or not storage.nbytes() or tensor.device.type != device.type:
            # Detached: autograd's node would otherwise keep its own output, with the node itself.
            return tensor.detach()
        if key not in found:
            found[key] = _Kept(tensor)
            seen(storage.nbytes())
        offset = int(tensor.storage_offset())
        return _Handle(found[key], tensor.dtype, tensor.shape, tensor.stride(), offset)

    with saved_tensors_hooks(pack, _unpacked):
        yield found
    # The graph keeps ``pack``. Without the storages, only handles keep them, and free one by one.
    found.clear()


def _unpacked(kept: Tensor | _Handle) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.tensor()


def storages_of(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Return the addresses of the storages of ``tensors``."""
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors)


class HostBuffers:
    """Buffers in the memory of the host, which are reused.

    Args:
        device: from which activations are copied.
        pins: whether memory for a GPU is pinned; without, a copy may keep the host waiting.
    """

    def __init__(self, device: torch.device, *, pins: bool = True) -> None:
        self._pinned = pins and device.type == "cuda"
        self._rooms = Rooms()
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    @property
    def bytes(self) -> int:
        """All bytes, whether they are in use or not."""
        return self._rooms.bytes

    def take(self, size: int) -> Tensor:
        """Return a buffer of at least ``size`` bytes, the smallest that is free."""
        room = self._rooms.take(size)
        free = self._free[room]
        return free.pop() if free else torch.empty(room, dtype=torch.uint8, pin_memory=self._pinned)

    def give(self, buffer: Tensor) -> None:
        """Let a buffer be used again, by copies that follow in the lane."""
        self._rooms.give(buffer.numel())
        self._free[buffer.numel()].append(buffer)

    def release(self) -> None:
        """Give all buffers, none of which is in use, back to the system."""
        assert self.bytes == sum(room * len(own) for room, own in self._free.items()), "in use"
        self._free.clear()
        self._rooms = Rooms()


class _Moved:
    """The activations of a chunk and unit: their storages, and where these are on the host.

    Attributes:
        kept: the storages.
        buffer: the host's buffer, from O to L.
    """

    def __init__(self, kept: Sequence[_Kept]) -> None:
        self.kept = kept
        self.buffer: Tensor | None = None

    @property
    def room(self) -> int:
        """Bytes that the storages take in a buffer."""
        return sum(map(_room, self.kept))

    def parts(self) -> Iterator[tuple[_Kept, Tensor]]:
        """Yield every storage with its part of the buffer."""
        assert self.buffer is not None, "on the device"
        place = 0
        for kept in self.kept:
            yield kept, self.buffer[place : place + kept.nbytes].view(kept.dtype)
            place += _room(kept)


def _room(kept: _Kept) -> int:
    return -(-kept.nbytes // _ALIGNED) * _ALIGNED


class HostCopies:
    """The copies of one rank to and from its host.

    Args:
        program: of a training iteration.
        rank: pipeline rank.
        shared: tensors that live longer than a microbatch.
        lane: where the copies run, one after the other.
        buffers: memory of the host; programs may share it.
        device: where the passes run.

    Attributes:
        rooms: bytes that the activations of every (slice, chunk) have taken in a buffer.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        shared: Iterable[Tensor],
        lane: Lane,
        buffers: HostBuffers,
        device: torch.device,
    ) -> None:
        self.rooms: dict[tuple[int, int], int] = {}
        self._program, self._rank = program, rank
        self._plan = program.plan
        self._chosen = {self._key(comm) for comm in program.copies(rank)}
        self._always = storages_of(shared)
        self._shared = self._always
        self._lane = lane
        self._buffers = buffers
        self._device = device
        self._moved: dict[tuple[int, int], _Moved] = {}

    def _key(self, comm: Comm) -> tuple[int, int]:
        """Return the unit and the chunk of a copy."""
        return self._plan.unit(comm), self._plan.stages[comm.stage][1]

    def begin(self, units: Sequence[DeviceMicrobatch]) -> None:
        """Begin an iteration over ``units``; the iteration before may have been abandoned."""
        self._shared = self._always | storages_of(t for own in units for t in own.kept_by_layers)
        for moved in self._moved.values():
            if moved.buffer is not None:
                self._buffers.give(moved.buffer)
        self._moved.clear()

    def reserve(self, rooms: Mapping[tuple[int, int], int]) -> None:
        """Get all buffers of an iteration, so that its first O does not wait for pinned memory.

        Args:
            rooms: bytes for every (slice, chunk).
        """

        def size_of(comm: Comm) -> int:
            return rooms[comm.slice, self._plan.stages[comm.stage][1]]

        take_all(self._program, self._rank, size_of, self._buffers)

    def release(self) -> None:
        """Give the buffers back to the system; no activations are on the host."""
        self._buffers.release()

    @contextmanager
    def _handing_over(self, item: Pass, keys: SeenKeys | None) -> Iterator[None]:
        with handed_over(self._device, self._shared, keys) as storages:
            yield
            moved = _Moved(list(storages.values()))
            self._moved[self._plan.unit(item), item.chunk] = moved
            self.rooms[item.slice, item.chunk] = moved.room

    def around(self, item: Pass, keys: SeenKeys | None) -> AbstractContextManager[None]:
        """Return the context of an F, which hands over the activations that the program moves."""
        key = self._plan.unit(item), item.chunk
        return self._handing_over(item, keys) if key in self._chosen else nullcontext()

    def start(self, comm: Comm, recorder: Observer | None = None) -> Pending[object]:
        """Begin O of the activations that an F has left, or L of activations on the host."""
        moved = self._moved[self._key(comm)]
        work = self._out(moved) if comm.kind == "O" else self._back(moved)
        return self._lane.submit(work if recorder is None else recorder.timed(comm, work))

    def _out(self, moved: _Moved) -> Callable[[], object]:
        moved.buffer = self._buffers.take(moved.room)
        parts = [(kept.elements, there) for kept, there in moved.parts()]

        def work() -> None:
            for here, there in parts:
                assert here is not None, "copied twice"
                there.copy_(here, non_blocking=True)

        return work

    def _back(self, moved: _Moved) -> Callable[[], object]:
        # Memory of the passes' stream: the lane waits for that stream before it copies, so nothing
        # there still uses the memory.
        parts = [
            (torch.empty(kept.size, dtype=kept.dtype, device=self._device), there)
            for kept, there in moved.parts()
        ]
        assert moved.buffer is not None, "on the device"
        self._buffers.give(moved.buffer)
        moved.buffer = None

        def work() -> list[Tensor]:
            for here, there in parts:
                here.copy_(there, non_blocking=True)
            return [here for here, _ in parts]

        return work

    def finish(self, comm: Comm, pending: Pending[object]) -> None:
        """Wait for a copy. Release the tensors that O has copied, or hand out the copies of L."""
        key = self._key(comm)
        result = pending.wait()
        if comm.kind == "O":
            for kept in self._moved[key].kept:
                # The passes' stream has waited for the copy, so it may reuse the memory.
                kept.elements = None
            return
        assert isinstance(result, list)
        for kept, elements in zip(self._moved.pop(key).kept, result, strict=True):
            kept.elements = elements
