"""Messages and collectives of an emulated rank: real ones, which take the time they are told to."""

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron.parallel.groups import Groups
from megatron.parallel.lanes import Lane, Pending
from megatron.runtime.communicator import Communicator
from megatron.schedules.lower import lane as lane_of
from megatron.schedules.needs import Comm, participants
from megatron.schedules.plan import Plan
from tools.emulation.emulated_passes import TENSORS, EmulatedPasses, Pacer
from tools.emulation.pace import Queue


@dataclass
class Link:
    """One direction between two ranks; messages arrive in the order in which they were sent.

    Attributes:
        under_way: messages for which no rank has waited yet.
        queue: the awaited messages.
    """

    under_way: "deque[Message]"
    queue: Queue = field(default_factory=Queue)


class Message:
    """A real transfer that counts as arrived when the emulated transfer would have arrived.

    The sender does not know when the receiver was ready, and counts from its own start.

    Args:
        link: the link of the message.
        pending: the real transfer, just issued; its last number is the time at which it was sent.
        seconds: how long it takes.
        pacer: sleeps.
    """

    def __init__(self, link: Link, pending: Pending[Any], seconds: float, pacer: Pacer) -> None:
        self._link = link
        self._pending = pending
        self._seconds = seconds
        self._pacer = pacer
        self._issued = time.perf_counter()
        self._through: float | None = None
        self._tensor: Tensor | None = None
        link.under_way.append(self)

    def wait(self) -> Tensor | None:
        """Return the result of a communication, no sooner than the emulated one would end."""
        while self._through is None:
            self._link.under_way.popleft()._settle()
        self._pacer.sleep_until(self._through)
        return self._tensor

    def _settle(self) -> None:
        """Wait for the real transfer, and find out when the emulated one is through."""
        tensor = self._tensor = self._pending.wait()
        ready = max(self._issued, tensor.view(-1)[-1].item())
        self._through = self._link.queue.through(ready, self._seconds)


class EmulatedCommunicator(Communicator):
    """A communicator whose messages take the time they are told to.

    Args:
        groups: the process groups.
        plan: the training plan.
        passes: this rank's passes.
        lane: where collectives run beside the passes.
        seconds: time of a communication.
        pacer: sleeps.
    """

    def __init__(
        self,
        groups: Groups,
        plan: Plan,
        passes: EmulatedPasses,
        lane: Lane,
        seconds: Callable[[Comm], float],
        pacer: Pacer,
    ) -> None:
        super().__init__(groups, plan, passes, lane, TENSORS)
        self._seconds = seconds
        self._pacer = pacer
        self._links: dict[tuple[str | int, ...], Link] = defaultdict(lambda: Link(deque()))

    def start(self, comm: Comm) -> Pending[object]:
        """Issue ``comm``; a message takes the time with it."""
        if comm.kind not in ("X", "G"):
            return super().start(comm)
        if self._groups.pipeline.rank == participants(self._plan, comm)[0]:
            name = "output" if comm.kind == "X" else "input_gradient"
            tensor = self.passes.store.get(name, self._plan.unit(comm), comm.stage)
            tensor.view(-1)[-1] = time.perf_counter()
        link = self._links[lane_of(self._plan, comm)]
        return Message(link, super().start(comm), self._seconds(comm), self._pacer)
