"""The ranks of a job that are not there: when they would be ready, and what they would send."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from megatron.parallel.links import Link
from megatron.runtime.timeline import Recorder
from megatron.schedules.needs import Comm
from megatron.simulator.costs.cluster import Cluster

T = TypeVar("T")


class Rewinds(Protocol):
    """A group whose messages are numbered in each iteration."""

    def rewind(self) -> None:
        """Begin an iteration with the first message."""
        ...


@dataclass(frozen=True)
class Blocks:
    """Thread blocks of a communication.

    Attributes:
        transfers: of a message between stages.
        vocabulary: of a collective of the vocabulary layers.
        tensor: of a collective of tensor-parallel ranks.
    """

    transfers: int = 4
    vocabulary: int = 4
    tensor: int = 16

    def of(self, use: str) -> int:
        """Return the blocks for a use of groups; what no pass waits for has one block."""
        word = use.partition(" ")[0]
        known = {
            "transfers": self.transfers,
            "vocabulary": self.vocabulary,
            "tensor": self.tensor,
        }
        return known.get(word, 1)

    @property
    def together(self) -> int:
        """The most blocks of collectives that are often under way at once."""
        return self.vocabulary + self.tensor


def make_spinner(device: torch.device) -> Any:
    """Return the launcher of kernels on a GPU; ``None``: on a CPU waits sleep."""
    if device.type != "cuda":
        return None
    from tools.gpu_sections.spinning import Spinner  # needs Triton

    return Spinner(device)


@dataclass
class Peers:
    """The ranks that are not there.

    Attributes:
        device: on which this rank computes.
        price: gives the seconds of communications.
        crossing: pairs of pipeline ranks whose messages leave a machine.
        blocks: thread blocks of communications on a GPU.
        messages: messages of this rank in an iteration, by link, in order.
        ready: for each communication of an iteration, the seconds after the begin of the iteration
            at which the last of its other ranks has issued it; absent ones are there at once.
        are_there: whether communications take their time; otherwise nothing is moved on a GPU.
    """

    device: torch.device
    price: Cluster
    crossing: frozenset[tuple[int, int]] = frozenset()
    blocks: Blocks = field(default_factory=Blocks)
    messages: Mapping[Link, Sequence[Comm]] = field(default_factory=dict)
    ready: Mapping[Comm, float] = field(default_factory=dict)
    are_there: bool = True

    def __post_init__(self) -> None:
        self.origin = 0.0
        self._groups: list[Rewinds] = []
        self._noise: dict[torch.dtype, Tensor] = {}
        self._now = threading.local()
        self.spinner = make_spinner(self.device)

    def add(self, group: Rewinds) -> None:
        """Note a group, whose messages begin anew with each iteration."""
        self._groups.append(group)

    def begin(self) -> None:
        """Begin an iteration: planned times count from now on."""
        for group in self._groups:
            group.rewind()
        if self.spinner is None:
            self.origin = time.perf_counter()
        else:
            self.spinner.begin()

    @contextmanager
    def during(self, comm: Comm) -> Iterator[None]:
        """Return a context whose group calls belong to ``comm``, of the calling thread."""
        before, self._now.ready = self.ready_now, self.ready.get(comm, 0.0)
        try:
            yield
        finally:
            self._now.ready = before

    @property
    def ready_now(self) -> float:
        """Seconds after the begin at which the peers are there, of the communication under way."""
        return float(getattr(self._now, "ready", 0.0))

    def noise(self, like: Tensor) -> Tensor:
        """Return random numbers of the shape and type of ``like``; those in fp32 are positive."""
        known, size = self._noise.get(like.dtype), like.numel()
        if known is None or known.numel() < size:
            drawn = torch.randn(size, device=like.device)
            if like.dtype == torch.float32:
                drawn = drawn.abs() + 0.5  # statistics of a softmax have logarithms
            known = self._noise[like.dtype] = drawn.to(like.dtype)
        return known[:size].view(like.shape)


class PacedRecorder(Recorder):
    """Records an iteration, and says to which communication the calls of groups belong.

    Args:
        rank: pipeline rank.
        peers: the ranks that are not there.
    """

    def __init__(self, rank: int, peers: Peers) -> None:
        super().__init__(rank, peers.device)
        self._peers = peers

    def timed(self, comm: Comm, work: Callable[[], T]) -> Callable[[], T]:
        """As in ``Recorder``."""

        def paced() -> T:
            with self._peers.during(comm):
                return work()

        return super().timed(comm, paced)
