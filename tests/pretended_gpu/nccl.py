"""Process groups that NCCL would make, for a rank whose peers are not there.

Nothing is moved. What is issued is entered into the GPU's ledger, by which the ranks of a pipeline
can be compared afterwards. Every asynchronous transfer has a stream of its own, which begins after
what the caller's stream holds: there is no more order than that to rely on. The asynchronous
collectives of a communicator share one stream, as PyTorch's NCCL groups have one. Communications of
tensors on CPUs are gloo's, and between hosts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from pretended_gpu.gpu import PretendedGpu
from pretended_gpu.order import Issued, Mark
from torch import Tensor


class PretendedWork(dist.Work):
    """A communication under way; like PyTorch's, it keeps its tensors until it is waited for."""

    def __init__(self, gpu: PretendedGpu, mark: Mark, tensors: list[Tensor]) -> None:
        super().__init__()
        self._gpu = gpu
        self._mark = mark
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream wait; the host, if the tensors are there."""
        gpu = self._gpu
        if all(tensor.device.type == "cpu" for tensor in self._tensors):
            gpu.streams.let_the_host_wait(self._mark)
        else:
            gpu.streams.wait(gpu.current_stream(), self._mark)
        self._tensors = []
        return True


class PretendedNccl(dist.ProcessGroup):
    """A communicator of all ranks.

    Args:
        gpu: of this rank.
        name: of the communicator.
        rank: this one.
        size: ranks.
    """

    def __init__(self, gpu: PretendedGpu, name: str, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # PyTorch's stub knows one of two
        self._gpu = gpu
        self._name = name
        self._rank = rank
        self._size = size
        self._count = 0
        self._batch = 0

    def rank(self) -> int:
        """This rank."""
        return self._rank

    def size(self) -> int:
        """How many there are."""
        return self._size

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> PretendedWork:
        """Start sending."""
        return self._issue("send", destination, tensors, [], asynchronous=True)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> PretendedWork:
        """Start receiving."""
        return self._issue("receive", source, [], tensors, asynchronous=True)

    def broadcast(  # type: ignore[override]  # of PyTorch's overloads, only the one that is called
        self, tensors: list[Tensor], options: Any
    ) -> PretendedWork:
        """The root's tensor for everybody."""
        root = options.rootRank
        reads, writes = (tensors, []) if root == self._rank else ([], tensors)
        return self._issue("broadcast", root, reads, writes, options.asyncOp)

    def reduce(  # type: ignore[override]  # see broadcast
        self, tensors: list[Tensor], options: Any
    ) -> PretendedWork:
        """The sum for the root; in place, so that the others' is undefined after."""
        return self._issue("reduce", options.rootRank, [], tensors, options.asyncOp)

    def allreduce(  # type: ignore[override]  # see broadcast
        self, tensors: list[Tensor], options: Any
    ) -> PretendedWork:
        """The sum or maximum for everybody, in place."""
        return self._issue("all_reduce", -1, [], tensors, options.asyncOp)

    def all_gather_single(  # type: ignore[override]  # see broadcast
        self, output: Tensor, tensor: Tensor, options: Any
    ) -> PretendedWork:
        """The tensors of everybody, for everybody."""
        return self._issue("all_gather", -1, [tensor], [output], options.asyncOp)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, options: Any) -> PretendedWork:
        """Its part of the sum for everybody."""
        return self._issue("reduce_scatter", -1, [tensor], [output], options.asyncOp)

    def all_to_all_single(  # type: ignore[override]  # see broadcast
        self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int], options: Any
    ) -> PretendedWork:
        """Everybody's part for everybody."""
        return self._issue("all_to_all", -1, [tensor], [output], options.asyncOp)

    def start_together(self, transfers: "list[Transfer]") -> list[PretendedWork]:
        """Start sending and receiving at once."""
        self._batch = self._count + 1
        works = [
            (self.send if own.op is dist.isend else self.recv)([own.tensor], own.group_peer, 0)
            for own in transfers
        ]
        self._batch = 0
        return works

    def _issue(
        self,
        kind: str,
        peer: int,
        reads: list[Tensor],
        writes: list[Tensor],
        asynchronous: bool,
    ) -> PretendedWork:
        gpu = self._gpu
        tensors = [*reads, *writes]
        [shape] = {tuple(tensor.shape) for tensor in (reads or writes)}
        assert all(tensor.is_contiguous() for tensor in tensors)
        self._count += 1
        name = f"{self._name} {kind} {self._count}"
        caller, on_host = gpu.current_stream(), tensors[0].device.type == "cpu"
        stream = name if asynchronous or on_host else caller
        if asynchronous and not on_host and kind not in ("send", "receive"):
            stream = f"{self._name} collectives"
        if not on_host:
            gpu.streams.wait(stream, gpu.streams.mark(caller))
        issued = Issued(self._name, kind, peer, shape, str(tensors[0].dtype), on_host, self._batch)
        gpu.use(name, stream, reads, writes, issued)
        return PretendedWork(gpu, gpu.streams.mark(stream), tensors)


class Transfer(NamedTuple):
    """In place of ``dist.P2POp``, which wants groups that PyTorch has made."""

    op: Callable[..., Any]
    tensor: Tensor
    group: PretendedNccl
    group_peer: int


def start_together(transfers: list[Transfer]) -> list[PretendedWork]:
    """In place of ``dist.batch_isend_irecv``; the transfers are of one communicator."""
    return transfers[0].group.start_together(transfers)
