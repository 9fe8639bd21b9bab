"""A rank that emulates a GPU: program, executor, communicator and groups are real, passes sleep.

Every pass sleeps for its time. It mixes the numbers that it takes into the number that it leaves,
so a wrong checksum of an iteration shows that some data went to the wrong place. As in the
simulator, a communication with a given time begins when all participants have issued it and its
lane is free. A message carries the time at which it was sent, and a collective keeps its lane busy.
All ranks must run on one machine, because they share its monotonic clock.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from megatron.layers.vocabulary.output_s import Merged, merge_statistics
from megatron.parallel.groups import Groups
from megatron.parallel.lanes import Lane, Pending
from megatron.parallel.turns import Turns
from megatron.runtime.communicator import Communicator
from megatron.runtime.placeholder_passes import PlaceholderPasses, PlaceholderState
from megatron.runtime.store import ActivationStore
from megatron.runtime.units import UnitTensors
from megatron.schedules.lower import lane as lane_of
from megatron.schedules.needs import Comm, participants
from megatron.schedules.passes import PASS_KINDS, Pass
from megatron.schedules.plan import Plan
from tools.emulation.emulated_replicas import EmulatedBuckets

T = TypeVar("T")

TENSORS: Final = UnitTensors([(1, 1, 2)], torch.float64, torch.float64)
"""An emulated activation has a number, and the time at which it was sent. The type is exact for
sums of numbers below ``MODULUS`` over any number of ranks."""

MODULUS: Final = 2**31 - 1
_FACTOR: Final = 1_000_003

EXCHANGES: Final = 8
"""Exchanges of tokens in a pass of a pair: two in each of four layers."""


def mix(item: Pass, rank: int, *taken: int) -> int:
    """Return the number that ``item`` of ``rank`` leaves; it depends on every argument."""
    value = PASS_KINDS.index(item.kind)
    for part in (item.microbatch, item.chunk, rank, *taken):
        value = (value * _FACTOR + part + 1) % MODULUS
    return value


class Pacer:
    """Makes passes and collectives last, and counts the time a rank spends beside them.

    It observes the executor (``megatron.runtime.observer.Observer``).

    Args:
        duration: seconds of a pass, which must be more than emulating it takes.
        seconds: time of a communication; free ones take what they take on this machine.
        overshoot: seconds by which a sleep lasts too long on this machine.
        waits: seconds of a pass in which it only waits for its exchanges.

    Attributes:
        turns: of the passes of a pair.
        overheads: for every pass, the seconds between the end of the one before and its own begin
            in which the rank did not wait for a communication.
    """

    def __init__(
        self,
        duration: Callable[[Pass], float],
        seconds: Callable[[Comm], float],
        overshoot: float,
        waits: Callable[[Pass], float] = lambda item: 0.0,
    ) -> None:
        self.turns = Turns()
        self.overheads: list[float] = []
        self._duration = duration
        self._seconds = seconds
        self._overshoot = overshoot
        self._waits = waits
        self._is_pair = False
        self._awake_since = 0.0

    def begin(self, start: float) -> None:
        """Sleep until ``start`` on the monotonic clock, and count from there."""
        self.overheads = []
        self.sleep_until(start)
        self._awake_since = start

    def sleep_until(self, deadline: float) -> None:
        """Sleep until the monotonic clock shows ``deadline``."""
        remaining = deadline - time.monotonic() - self._overshoot
        if remaining > 0:
            time.sleep(remaining)
        while time.monotonic() < deadline:
            pass

    @contextmanager
    def span(self, item: Pass) -> Iterator[None]:
        """Make a pass last its time."""
        start = time.monotonic()
        self.overheads.append(start - self._awake_since)
        yield
        self.sleep_until(start + self._duration(item))
        self._awake_since = time.monotonic()

    @contextmanager
    def pair(self, forward: Pass, backward: Pass) -> Iterator[None]:
        """Let the passes of a pair last by themselves (``in_turns``)."""
        self.overheads.append(time.monotonic() - self._awake_since)
        self._is_pair = True
        yield
        self._is_pair = False
        self._awake_since = time.monotonic()

    def in_turns(self, item: Pass) -> None:
        """Make a pass of a pair last: it works, and hands over while its tokens travel.

        As in a real layer, F works before each of its exchanges, and B after each of them.
        """
        if not self._is_pair:
            return
        wait = self._waits(item) / EXCHANGES
        work = self._duration(item) / EXCHANGES - wait
        for _ in range(EXCHANGES):
            if item.kind == "F":
                self.sleep_until(time.monotonic() + work)
            arrival = time.monotonic() + wait
            self.turns.hand_over()
            self.sleep_until(arrival)
            if item.kind == "B":
                self.sleep_until(time.monotonic() + work)

    @contextmanager
    def waiting(self, comm: Comm) -> Iterator[None]:
        """Leave the wait for a communication out of what is counted."""
        start = time.monotonic()
        yield
        self._awake_since += time.monotonic() - start

    def timed(self, comm: Comm, work: Callable[[], T]) -> Callable[[], T]:
        """Return the ``work`` of a collective that keeps its lane busy for its time."""
        seconds = self._seconds(comm)

        def lasting() -> T:
            result = work()
            self.sleep_until(time.monotonic() + seconds)
            return result

        return lasting if seconds else work


def measure_overshoot(samples: int = 50) -> float:
    """Return the seconds by which a sleep takes too long on this machine, in the median."""
    excess = []
    for _ in range(samples):
        start = time.monotonic()
        time.sleep(1e-3)
        excess.append(time.monotonic() - start - 1e-3)
    return median(excess)


class EmulatedPasses(PlaceholderPasses):
    """Passes that mix the numbers that they take into new ones; a ``Pacer`` makes them last.

    Args:
        plan: the training plan.
        rank: pipeline rank.
        replica: number of this pipeline; the numbers of each pipeline differ.
        buckets: whose numbers passes take and add to.
        pacer: makes the passes of pairs last.

    Attributes:
        checksum: sum of the numbers of all passes, modulo ``MODULUS``.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        replica: int = 0,
        buckets: EmulatedBuckets | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        store, device = ActivationStore(), torch.device("cpu")
        super().__init__(plan, rank, store, TENSORS, device)
        self.checksum = 0
        self._place = replica * plan.ranks + rank
        self._buckets = buckets
        self._pacer = pacer

    def result(self, item: Pass, *taken: Any) -> float:
        """Return a number that is mixed from all numbers that ``item`` has taken."""
        read = () if self._buckets is None else self._buckets.read(item)
        value = mix(item, self._place, *map(_number, (*taken, *read)))
        if self._buckets is not None:
            self._buckets.add(item, value)
        self.checksum = (self.checksum + value) % MODULUS
        if self._pacer is not None:
            self._pacer.in_turns(item)
        return value

    def updated(self, bucket: int) -> int:
        """Return the number that U of a bucket leaves."""
        return mix(Pass("U", bucket), self._place)

    def merge(self, i: int, state: Any, statistics_p4n: Tensor) -> tuple[Merged, Tensor | None]:
        """As in ``Passes``."""
        merged = merge_statistics(statistics_p4n)
        if state.raw_gradient_nh is None:
            return merged, None
        number = mix(Pass("T", i), self._place, _number(state), _number(merged))
        return merged, self._all_tokens(i, number)


def _number(taken: Tensor | Merged | PlaceholderState | float) -> int:
    """Return the number that a pass has taken."""
    if isinstance(taken, PlaceholderState):
        return int(taken.value)
    if isinstance(taken, Merged):
        taken = taken.sum_n
    return int(taken.view(-1)[0].item() if isinstance(taken, Tensor) else taken)


@dataclass
class Link:
    """One direction between two ranks; messages arrive in the order in which they were sent.

    Attributes:
        under_way: messages for which no rank has waited yet.
        free: time at which the last awaited message had arrived.
    """

    under_way: "deque[Message]"
    free: float = 0.0


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
        self._issued = time.monotonic()
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
        start = max(self._issued, tensor.view(-1)[-1].item(), self._link.free)
        self._through = self._link.free = start + self._seconds


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
            tensor = self.passes.store.get(name, comm.microbatch, comm.stage)
            tensor.view(-1)[-1] = time.monotonic()
        link = self._links[lane_of(self._plan, comm)]
        return Message(link, super().start(comm), self._seconds(comm), self._pacer)
