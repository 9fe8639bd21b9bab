"""A GPU that is not there: the CUDA code runs on it, and what would go wrong on a real one shows.

Tensors are PyTorch's fake ones, with a device and a shape and no values. The streams and events of
``torch.cuda`` are replaced (``replaced.py``) by ones that keep a ledger (``order.py``). Every
operation enters it: what it reads and what it writes, on which stream. Found are

* work on two streams that touches the same memory, with nothing that orders it;
* memory that goes back to the allocator while a stream that it does not wait for still uses it;
* a host that waits for the device where it must not;
* how much memory is held, as if all that was let go of were free at once, with what PyTorch lends
  cuBLAS on an A100 for every thread and stream that multiplies;
* how much memory of the host is held by tensors, pinned ones as PyTorch's allocator pins them.

Left to real GPUs: values, times, what their own kernels use besides, and whether NCCL does what it
is told to.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch
from pretended_gpu.load import load_guard
from pretended_gpu.order import Block, Issued, Mark, Memory, Pool, Streams, Work
from pretended_gpu.replaced import kernels, streams_and_events
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.kernels.cuda import block_products
from megatron.kernels.cuda.sizes import quotient
from megatron.kernels.cuda.update_operators import BLOCK, SQUARES_BLOCK
from megatron.planning.count.launches import tensors_of, uses_of
from megatron.simulator.costs.gpus import WORKSPACE

DEVICE = torch.device("cuda", 0)
CUDNN: Final = 91900
"""Version of cuDNN: one whose attention is the fastest on this GPU, which has capability 9."""
GRANULE = 512
"""Bytes: CUDA's allocator gives multiples of it."""

_aten = torch.ops.aten

_OF_CUBLAS = {"mm", "addmm", "bmm", "baddbmm"}
"""Operations for which PyTorch calls cuBLAS."""

_WITH_TABLE = {"adamw_": BLOCK, "sums_of_squares": SQUARES_BLOCK}
"""Operators that find blocks of their tensors by a table (``kernels/cuda/update_operators.py``),
with the elements of a block."""


class HostMemory:
    """Bytes of the host in tensors; a pinned one has a power of two of bytes.

    Attributes:
        held: by all tensors now.
        peak: most of ``held`` so far.
        pinned: most bytes of pinned tensors so far.
    """

    def __init__(self) -> None:
        self.held = self.peak = self.pinned = 0
        self._pinned_now = 0
        self._known: set[int] = set()

    def hold(self, storage: torch.UntypedStorage, *, pinned: bool) -> None:
        """Note a storage until it is freed; one that is known is not counted again."""
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or not size:
            return
        room = 1 << (size - 1).bit_length() if pinned else size
        self._known.add(key)
        self._change(room, pinned)
        weakref.finalize(storage, self._free, key, room, pinned).atexit = False

    def _free(self, key: int, room: int, pinned: bool) -> None:
        self._known.discard(key)
        self._change(-room, pinned)

    def _change(self, room: int, pinned: bool) -> None:
        self.held += room
        self.peak = max(self.peak, self.held)
        self._pinned_now += room * pinned
        self.pinned = max(self.pinned, self._pinned_now)


class PretendedGpu(TorchDispatchMode):
    """The device of one rank; a context in which ``torch.cuda`` is about it.

    Attributes:
        streams: what comes after what.
        memory: what is held.
        host: memory of the host that tensors hold.
        ranges: names of the NVTX ranges.
        forms: of the programs that were used; see ``_form``.
        number_of_others: what a tensor on the host has for its values, as if it had come from
            another rank; one on the device has 1.
        named_waits: how often the host has waited for the device where it may.
        multiplying: threads that have multiplied, each with the stream. cuBLAS has a workspace for
            each.
    """

    def __init__(self, number_of_others: float = 1.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # TorchDispatchMode has no types
        self.number_of_others = number_of_others
        self.ranges: list[str] = []
        self.forms: set[str] = set()
        self.named_waits = 0
        self.multiplying: set[tuple[int, str]] = set()
        self._tables: set[tuple[int, ...]] = set()
        self._host_must_not_wait = False
        self.streams = Streams()
        self.memory = Memory(self.streams)
        self.host = HostMemory()
        self._guard = load_guard()
        self._blocks: dict[int, Block] = {}
        self._pinned: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._names = ["passes"]
        self._captures_on: int | None = None
        self._context = ExitStack()
        self._fake = FakeTensorMode()

    @property
    def faults(self) -> list[str]:
        """What was found, in words."""
        return self.memory.faults

    def __enter__(self) -> "PretendedGpu":
        self._context.enter_context(streams_and_events(self))
        # PyTorch for CPUs has neither cuDNN nor cuBLAS, and this GPU has both.
        has = patch.object(block_products, "has_block_products", lambda device: True)
        self._context.enter_context(patch.object(torch.backends.cudnn, "version", lambda: CUDNN))
        self._context.enter_context(has)
        self._context.enter_context(kernels())
        self._context.enter_context(self._fake)
        super().__enter__()  # type: ignore[no-untyped-call]  # TorchDispatchMode has no types
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]  # TorchDispatchMode has no types
        self._context.__exit__(*exception)

    @contextmanager
    def in_other_thread(self) -> Iterator[None]:
        """Be the device of the calling thread too: modes of PyTorch are those of one thread."""
        with self._fake:
            super().__enter__()  # type: ignore[no-untyped-call]  # TorchDispatchMode has no types
            try:
                yield
            finally:
                super().__exit__(None, None, None)  # type: ignore[no-untyped-call]  # as above

    @contextmanager
    def capturing(self, pool: Pool) -> Iterator[None]:
        """Issue work on the stream of captures, with memory from ``pool``."""
        if self._captures_on is None:
            self._captures_on = torch.cuda.Stream().stream_id  # a pretended one
        own, other = self.current_stream(), self.name(self._captures_on)
        self.streams.wait(other, self.streams.mark(own))
        before, self.memory.pool = self.enter_stream(self._captures_on), pool
        try:
            yield
        finally:
            self.memory.pool = None
            self.enter_stream(before)
            self.streams.wait(own, self.streams.mark(other))

    @contextmanager
    def without_waiting(self) -> Iterator[None]:
        """Make it a fault if the host waits for the device within."""
        before, self._host_must_not_wait = self._host_must_not_wait, True
        try:
            yield
        finally:
            self._host_must_not_wait = before

    def current_stream(self) -> str:
        """Name of the stream that this thread issues work on."""
        return self._names[self.current_number()]

    def current_number(self) -> int:
        """Its number."""
        number: int = self._guard.current_stream()
        return number

    def new_stream(self) -> int:
        """Return the number of a new stream."""
        self._names.append(f"stream {len(self._names)}")
        return len(self._names) - 1

    def name(self, stream: int) -> str:
        """Name of a stream."""
        return self._names[stream]

    def enter_stream(self, stream: int) -> int:
        """Issue this thread's work on ``stream`` from now on; return what it was before."""
        before = self.current_number()
        self._guard.set_current_stream(stream)
        return before

    def host_waits(self, what: str, mark: Mark | None = None, *, named: bool = False) -> None:
        """Note that the host waits for ``mark``, by default for all that this thread has issued.

        A wait that is ``named`` is never a fault.
        """
        if mark is None:
            mark = self.streams.mark(self.current_stream())
        self.streams.let_the_host_wait(mark)
        self.named_waits += named
        if self._host_must_not_wait and not named:
            self.faults.append(f"the host waits: {what}")

    def use(
        self,
        what: str,
        stream: str,
        reads: list[Tensor],
        writes: list[Tensor],
        issued: Issued | None = None,
    ) -> Work:
        """Enter work on ``stream``, perhaps a communication, into the ledger."""
        work = self.streams.issue(what, stream, issued)
        for use, tensors in ((self.memory.read, reads), (self.memory.write, writes)):
            for tensor in tensors:
                if tensor.device.type == "cuda":
                    use(self._block(tensor, work), work)
        return work

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and enter it into the ledger."""
        kwargs = kwargs or {}
        if function.namespace in ("prim", "c10d"):  # asks for a device; is entered by the group
            return function(*args, **kwargs)
        special = _SPECIAL.get(function)
        if special is not None:
            return special(self, *args, **kwargs)
        tensors = tensors_of((args, kwargs))
        _check_generator(kwargs.get("generator"), tensors)
        self._look_for_waits(function, args, kwargs, tensors)
        stream = self.current_stream()
        result = function(*args, **kwargs)
        if kwargs.get("pin_memory"):
            self._pinned.add(result.untyped_storage())
        for tensor in tensors_of(result):
            if tensor.device.type == "cpu":
                self.host.hold(tensor.untyped_storage(), pinned=bool(kwargs.get("pin_memory")))
        if any(t.device.type == "cuda" for t in [*tensors, *tensors_of(result)]):
            reads, writes = uses_of(function, args, kwargs)
            if function.namespace == "megatron_kernels":
                self.forms.add(_form(function, args, kwargs))
            work = self.use(str(function), stream, reads, writes)
            self._lend_workspace(function, work)
            self._keep_table(function, args, work)
            for tensor in tensors_of(result):
                if tensor.device.type == "cuda":
                    self._block(tensor, work)
        return result

    def _lend_workspace(self, function: Any, work: Work) -> None:
        """Allocate a workspace if this thread multiplies on the stream for the first time."""
        user = threading.get_ident(), work.stream
        if function.overloadpacket.__name__ in _OF_CUBLAS and user not in self.multiplying:
            self.multiplying.add(user)
            self.memory.allocate(WORKSPACE, work)

    def _keep_table(self, function: Any, args: Any, work: Work) -> None:
        """Allocate the table of the blocks of tensors that are first updated or summed.

        The operators, which make it, do not run here.
        """
        block = _WITH_TABLE.get(function.overloadpacket.__name__)
        if block is not None:
            blocks = tuple(quotient(tensor.numel(), block) for tensor in args[0])
            if blocks not in self._tables:
                self._tables.add(blocks)
                self.memory.allocate(4 * sum(blocks), work)

    def _block(self, tensor: Tensor, work: Work) -> Block:
        """Return the block of ``tensor``, which ``work`` allocates if it is a new one."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._blocks:
            size = -(-storage.nbytes() // GRANULE) * GRANULE
            self._blocks[key] = self.memory.allocate(size, work)
            weakref.finalize(storage, self._free, key).atexit = False
        return self._blocks[key]

    def _free(self, key: int) -> None:
        self.memory.free(self._blocks.pop(key))

    def _look_for_waits(self, function: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        """Notice operations for which the host waits, as ``torch.cuda.set_sync_debug_mode`` does.

        Between host and device it does, but for copies of pinned memory that are told not to, and
        numbers that go along with a kernel. A mask makes indices, of which the host asks how many.
        """
        if function is _aten._to_copy.default:
            to = kwargs.get("device") or args[0].device
            where = {args[0].device.type, to.type}
            quick = kwargs.get("non_blocking", False) and self._is_pinned(args[0])
        else:
            where = {tensor.device.type for tensor in tensors}
            quick = function is _aten.fill_.Tensor
            if function is _aten.copy_.default:
                host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
                quick = args[2:3] == (True,) and all(map(self._is_pinned, host))
        if where == {"cpu", "cuda"} and not quick:
            self.host_waits(f"{function} between host and device")
        masked = function in (_aten.index_put_.default, _aten.index_put.default)
        if masked and any(tensor.dtype == torch.bool for tensor in tensors_of(args[1])):
            self.host_waits(f"{function} with a mask")

    def _scalar(self, tensor: Tensor) -> float | int | bool:
        if tensor.device.type == "cuda":
            self.host_waits("for a number (item, tolist, float, if)")
            number = 1.0
        else:
            number = self.number_of_others
        return number if tensor.is_floating_point() else int(number)

    def _record_stream(self, tensor: Tensor, stream: torch.Stream) -> None:
        work = self.streams.issue("record_stream", self.current_stream())
        self._block(tensor, work).kept_for.add(self.name(stream.stream_id))

    def _pin(self, tensor: Tensor, device: Any = None) -> Tensor:
        pinned = torch.empty_like(tensor)
        self._pinned.add(pinned.untyped_storage())
        self.host.hold(pinned.untyped_storage(), pinned=True)
        return pinned

    def _is_pinned(self, tensor: Tensor, device: Any = None) -> bool:
        return tensor.untyped_storage() in self._pinned


_SPECIAL: dict[Any, Callable[..., Any]] = {
    _aten._local_scalar_dense.default: PretendedGpu._scalar,
    _aten.record_stream.default: PretendedGpu._record_stream,
    _aten._pin_memory.default: PretendedGpu._pin,
    _aten.is_pinned.default: PretendedGpu._is_pinned,
}


def _check_generator(generator: torch.Generator | None, tensors: list[Tensor]) -> None:
    """Refuse what PyTorch does where values are drawn: a generator of another device.

    Raises:
        RuntimeError: it is one.
    """
    devices = {tensor.device.type for tensor in tensors}
    if generator is not None and devices - {generator.device.type}:
        raise RuntimeError(f"a generator of {generator.device} draws for {devices}")


def _form(function: Any, args: Any, kwargs: Any) -> str:
    """Return what decides which form of a program is compiled."""

    def of(leaf: Any) -> object:
        if not isinstance(leaf, Tensor):
            return bool(leaf)
        return str(leaf.dtype), [size % 16 == 0 for size in leaf.shape]

    return f"{function} {[of(leaf) for leaf in pytree.tree_leaves((args, kwargs))]}"
