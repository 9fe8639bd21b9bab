"""One rank of a job runs alone: stand-ins communicate in the place of its peers.

Layers, passes, executor and communicator are the real ones. Only process groups are replaced. A
communication begins when this rank has issued it and its peers would be there, and ends after its
planned seconds. It moves bytes within the memory of this rank: gathered parts are copies of its own
part, sums are its own summands, and received tensors are random numbers.

On a GPU a communication is a kernel (``spinning_programs.py``) on a stream of its group, where NCCL
would run. On a CPU, the wait for it sleeps.
"""

import time
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.grid import Grid, Tiling
from megatron.parallel.groups import CONTROL, STATE, ConnectedAxis, Groups, connect_grid
from megatron.parallel.links import Link
from megatron.simulator.costs.cluster import SpreadAxis
from megatron.simulator.costs.count import CollectiveKind
from tools.emulation.pace import Queue, sleep_until
from tools.gpu_sections.peers import Peers

T = TypeVar("T")

UNHURRIED: Final = ("gradients", "ends", CONTROL)
"""Uses of groups whose streams have no high priority, as in ``parallel/nccl.py``."""


class SleepingWork(dist.Work):
    """A communication on a CPU: the wait for it sleeps until its end, and copies then."""

    def __init__(self, end: float, source: Tensor, destination: Tensor | None) -> None:
        super().__init__()
        self._end, self._tensors = end, (source, destination)

    def wait(self, timeout: Any = None) -> bool:
        """Sleep until the end."""
        sleep_until(self._end)
        source, destination = self._tensors
        if destination is not None and destination is not source:
            destination.view(-1, source.numel()).copy_(source.reshape(1, -1))
        return True


class SpinningWork(dist.Work):
    """A communication on a GPU; like PyTorch's, it keeps its tensors until it is waited for."""

    def __init__(self, done: torch.cuda.Event, tensors: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._done, self._tensors = done, tensors

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream wait."""
        torch.cuda.current_stream().wait_event(self._done)
        self._tensors = ()
        return True


class StandInGroup(dist.ProcessGroup):
    """A process group of ranks of which only one is there.

    Args:
        peers: the other ranks.
        use: as for ``BlockSettings.of``.
        rank: place of the rank that is there.
        size: ranks.
        axis: of the collectives, for their price; ``None``: they take no time.
        link: the link whose messages the group carries, if any.
    """

    def __init__(
        self,
        peers: Peers,
        use: str,
        rank: int,
        size: int,
        axis: SpreadAxis | None,
        link: Link | None = None,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # PyTorch's stub knows one of two
        self._peers, self._use, self._axis = peers, use, axis
        self._place, self._size = rank, size
        self._link = link
        self._at, self._queue = 0, Queue()
        self._stream: torch.cuda.Stream | None = None
        if peers.device.type == "cuda" and use != STATE:
            hurried = use.partition(" ")[0] not in UNHURRIED
            self._stream = torch.cuda.Stream(peers.device, priority=-1 if hurried else 0)
        peers.add(self)

    def rewind(self) -> None:
        """Begin an iteration with the first message."""
        self._at, self._queue = 0, Queue()

    def rank(self) -> int:
        """Return the place of the rank that is there."""
        return self._place

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> dist.Work:
        """Send a message."""
        [tensor] = tensors
        return self._message(tensor, None, sends=True)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        """Receive random numbers."""
        [tensor] = tensors
        return self._message(self._peers.noise(tensor), tensor, sends=False)

    def broadcast(  # type: ignore[override]  # of PyTorch's overloads, only the one that is called
        self, tensors: list[Tensor], options: Any
    ) -> dist.Work:
        """Leave the root's tensor as it is, and give other ranks random numbers."""
        [tensor] = tensors
        if options.rootRank == self._place:
            return self._collective("broadcast", tensor, None, options)
        return self._collective("broadcast", self._peers.noise(tensor), tensor, options)

    def reduce(  # type: ignore[override]  # see broadcast
        self, tensors: list[Tensor], options: Any
    ) -> dist.Work:
        """Leave this rank's summand."""
        [tensor] = tensors
        return self._collective("reduce", tensor, tensor, options)

    def allreduce(  # type: ignore[override]  # see broadcast
        self, tensors: list[Tensor], options: Any
    ) -> dist.Work:
        """Leave this rank's summand."""
        [tensor] = tensors
        return self._collective("all_reduce", tensor, tensor, options)

    def all_gather_single(  # type: ignore[override]  # see broadcast
        self, output: Tensor, tensor: Tensor, options: Any
    ) -> dist.Work:
        """Fill ``output`` with copies of this rank's part."""
        return self._collective("all_gather", tensor, output, options)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, options: Any) -> dist.Work:
        """Leave this rank's summands; ``output`` is this rank's part of ``tensor``."""
        within = output.untyped_storage()._cdata == tensor.untyped_storage()._cdata
        assert within, "sums stay in their place"
        return self._collective("reduce_scatter", tensor, tensor, options)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Gather; this was the method's name before PyTorch 2.13."""
        return self.all_gather_single(output, input, opts)

    def _reduce_scatter_base(
        self, outputTensor: Tensor, inputTensor: Tensor, opts: Any
    ) -> dist.Work:
        """Scatter sums; this was the method's name before PyTorch 2.13."""
        return self.reduce_scatter_single(outputTensor, inputTensor, opts)

    def _message(self, source: Tensor, destination: Tensor | None, *, sends: bool) -> dist.Work:
        peers, link = self._peers, self._link
        ready, seconds = peers.ready_now, 0.0
        size = source.nbytes
        if link is not None:
            messages = peers.messages.get(link, ())
            if self._at < len(messages):
                ready = peers.ready.get(messages[self._at], 0.0)
            self._at += 1
            crosses = (link.sender, link.receiver) in peers.crossing
            seconds = peers.price.message(size, crossing=crosses)
        elif self._axis is not None and not sends:
            # On CPUs collectives are made of messages, of which half are received.
            seconds = peers.price.message(size, crossing=self._axis == "column")
        return self._issue(ready, seconds, source, destination, asynchronous=True)

    def _collective(
        self,
        kind: CollectiveKind,
        source: Tensor,
        destination: Tensor | None,
        options: Any,
    ) -> dist.Work:
        seconds = 0.0
        if self._axis is not None:
            size = (source if destination is None else destination).nbytes
            seconds = self._peers.price.exchange(self._axis, kind, self._size, size)
        ready = self._peers.ready_now
        return self._issue(ready, seconds, source, destination, asynchronous=options.asyncOp)

    def _issue(
        self,
        ready: float,
        seconds: float,
        source: Tensor,
        destination: Tensor | None,
        *,
        asynchronous: bool,
    ) -> dist.Work:
        """Issue a communication; without a ``destination`` the words are only read."""
        peers = self._peers
        seconds = seconds if peers.are_there else 0.0
        if self._stream is None:
            there = max(time.perf_counter(), peers.origin + ready * peers.are_there)
            return SleepingWork(self._queue.through(there, seconds), source, destination)
        current = torch.cuda.current_stream()
        stream = self._stream if asynchronous else current
        if asynchronous:
            stream.wait_stream(current)
        if peers.are_there:
            with torch.cuda.stream(stream):
                sink = torch.empty_like(source) if destination is None else destination
                blocks = peers.blocks.of(self._use)
                peers.spinner.launch(blocks, ready, seconds, source, sink)
        return SpinningWork(stream.record_event(), (source, destination))


class AloneAxis(ConnectedAxis):
    """An axis of which only one rank is there; the others would say what this rank says."""

    def all_gather_object(self, value: T) -> list[T]:
        """Return ``value`` for every rank."""
        return [value] * self.size

    def barrier(self) -> None:
        """Wait for nobody."""


def stand_in_groups(
    grid: Grid,
    rank: int,
    ends: tuple[int, ...],
    links: Sequence[Link],
    peers: Peers,
) -> Groups:
    """Return the groups of a rank whose peers are not there.

    Args:
        grid: all ranks of the job.
        rank: of the job.
        ends: as for ``make_groups``.
        links: links between stages; each has a group of its own.
        peers: the other ranks.
    """
    by_use = {f"transfers {link}": link for link in links}
    columns = grid.groups("pipeline")

    def connect(use: str, tiling: Tiling) -> StandInGroup:
        own = next((ranks for ranks in tiling if rank in ranks), tiling[0])
        axis: SpreadAxis | None = None
        if use in ("tensor", "vocabulary"):
            axis = "column" if use == "vocabulary" and own in columns else "tensor"
        place = own.index(rank) if rank in own else 0
        return StandInGroup(peers, use, place, len(own), axis, by_use.get(use))

    groups = connect_grid(grid, rank, peers.device, ends, connect, links)
    axes: dict[str, Any] = {
        own.name: AloneAxis(**{part.name: getattr(axis, part.name) for part in fields(axis)})
        for own in fields(groups)
        if isinstance(axis := getattr(groups, own.name), ConnectedAxis)
    }
    return replace(groups, **axes)
