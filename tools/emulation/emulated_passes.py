"""A rank that emulates a GPU: program, executor, communicator and groups are real, passes sleep.

Every pass sleeps for its time. It mixes the numbers that it takes into the number that it leaves,
so a wrong checksum of an iteration shows that some data went to the wrong place. As in the
simulator, a communication with a given time begins when all participants have issued it and its
lane is free. A message carries the time at which it was sent (``emulated_communicator``), and a
collective, or a copy to or from the host, keeps its lane busy. All ranks must run on one machine,
because they share its clock.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from megatron.layers.vocabulary.output_s import Merged, merge_statistics
from megatron.parallel.turns import Turns
from megatron.runtime.observer import Began
from megatron.runtime.offload import HostCopies
from megatron.runtime.placeholder_passes import PlaceholderPasses, PlaceholderState
from megatron.runtime.store import ActivationStore
from megatron.runtime.timeline import Recorder
from megatron.runtime.units import UnitTensors
from megatron.schedules.needs import Comm
from megatron.schedules.passes import CHUNKED_KINDS, PASS_KINDS, Pass
from megatron.schedules.plan import Plan
from megatron.simulator.simulate import Span
from tools.emulation.emulated_replicas import EmulatedBuckets
from tools.emulation.pace import sleep_until

T = TypeVar("T")

TENSORS: Final = UnitTensors([(1, 1, 2)], torch.float64, torch.float64)
"""An emulated activation has a number, and the time at which it was sent. The type is exact for
sums of numbers below ``MODULUS`` over any number of ranks."""

MODULUS: Final = 2**31 - 1
_FACTOR: Final = 1_000_003

EXCHANGES: Final = 8
"""Pieces of an F, B or W of a pair: two in each of four layers."""


def mix(item: Pass, rank: int, *taken: int) -> int:
    """Return the number that ``item`` of ``rank`` leaves; it depends on every argument."""
    value = PASS_KINDS.index(item.kind)
    for part in (item.microbatch, item.slice, item.chunk, rank, *taken):
        value = (value * _FACTOR + part + 1) % MODULUS
    return value


class Pacer(Recorder):
    """Makes passes and collectives last, and records them as training does.

    Args:
        rank: pipeline rank.
        duration: seconds of a pass, which must be more than emulating it takes.
        seconds: time of a communication; free ones take what they take on this machine.
        overshoot: seconds by which a sleep lasts too long on this machine.
        waits: seconds of a pass in which it only waits for its exchanges.

    Attributes:
        turns: of the passes of a pair.
    """

    def __init__(
        self,
        rank: int,
        duration: Callable[[Pass], float],
        seconds: Callable[[Comm], float],
        overshoot: float,
        waits: Callable[[Pass], float] = lambda item: 0.0,
    ) -> None:
        super().__init__(rank, torch.device("cpu"))
        self.turns = Turns()
        self._duration = duration
        self._of_comm = seconds
        self._overshoot = overshoot
        self._waits = waits
        self._is_pair = False

    def sleep_until(self, deadline: float) -> None:
        """Sleep until the clock (``time.perf_counter``) shows ``deadline``."""
        sleep_until(deadline, self._overshoot)

    @contextmanager
    def span(self, item: Pass) -> Iterator[None]:
        """Make a pass last its time."""
        with super().span(item):
            start = time.perf_counter()
            yield
            self.sleep_until(start + self._duration(item))

    @contextmanager
    def pair(self, first: Pass, second: Pass) -> Iterator[Began]:
        """Let the passes of a pair last by themselves (``in_turns``)."""
        self._is_pair = True
        with super().pair(first, second) as began:
            yield began
        self._is_pair = False

    def in_turns(self, item: Pass) -> None:
        """Make a pass of a pair last: it works, and hands over while it waits for a collective.

        As in a real layer, B works after each of its collectives, and other passes before each. A
        W hands over after its products, and a pass of the vocabulary layers not at all.
        """
        if not self._is_pair:
            return
        pieces = EXCHANGES if item.kind in CHUNKED_KINDS else 1
        wait = self._waits(item) / pieces
        work = self._duration(item) / pieces - wait
        for _ in range(pieces):
            if item.kind != "B":
                self.sleep_until(time.perf_counter() + work)
            arrival = time.perf_counter() + wait
            if pieces > 1:
                self.turns.hand_over()
            self.sleep_until(arrival)
            if item.kind == "B":
                self.sleep_until(time.perf_counter() + work)

    def timed(self, comm: Comm, work: Callable[[], T]) -> Callable[[], T]:
        """Return the ``work`` of a collective that keeps its lane busy for its time."""
        seconds = self._of_comm(comm)

        def lasting() -> T:
            result = work()
            self.sleep_until(time.perf_counter() + seconds)
            return result

        return super().timed(comm, lasting if seconds else work)


def overheads_of(spans: Iterable[Span]) -> list[float]:
    """Return the seconds before every pass, or pair, in which its rank neither ran nor waited.

    Args:
        spans: records of an iteration of one rank, from its common start on.
    """
    awake, found = 0.0, []
    for span in sorted(spans, key=lambda own: own.end):
        if span.lane == "wait":
            awake += span.length
        elif span.lane == "compute":
            if span.leads or not span.beside:  # the second of a pair follows the first at once
                found.append(span.start - awake)
            awake = span.end
    return found


def measure_overshoot(samples: int = 50) -> float:
    """Return the seconds by which a sleep takes too long on this machine, in the median."""
    excess = []
    for _ in range(samples):
        start = time.perf_counter()
        time.sleep(1e-3)
        excess.append(time.perf_counter() - start - 1e-3)
    return median(excess)


class KeptByAutograd:
    """A number in a tensor that autograd keeps for the backward, as it keeps activations."""

    def __init__(self, number: float) -> None:
        self._leaf = torch.zeros(1, dtype=TENSORS.dtype, requires_grad=True)
        self._product = self._leaf * torch.tensor([number], dtype=TENSORS.dtype)

    def read(self) -> int:
        """Return the number, which the backward of the product reads."""
        [gradient] = torch.autograd.grad(self._product.sum(), self._leaf)
        return int(gradient.item())


class EmulatedPasses(PlaceholderPasses):
    """Passes that mix the numbers that they take into new ones; a ``Pacer`` makes them last.

    Args:
        plan: the training plan.
        rank: pipeline rank.
        replica: number of this pipeline; the numbers of each pipeline differ.
        buckets: whose numbers passes take and add to.
        pacer: makes the passes of pairs last.
        host: the copies of a program that moves activations to the host. The number that an F of
            such a program leaves is a tensor that autograd keeps for B, as in a real F, so it is
            wrong or absent if B runs before the copies are done.

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
        host: HostCopies | None = None,
    ) -> None:
        store, device = ActivationStore(), torch.device("cpu")
        super().__init__(plan, rank, store, TENSORS, device)
        self.checksum = 0
        self._place = replica * plan.ranks + rank
        self._buckets = buckets
        self._pacer = pacer
        self._host = host

    def forward(self, item: Pass) -> None:
        """F: as in ``PlaceholderPasses``; the host's copies get what autograd keeps."""
        if self._host is None:
            super().forward(item)
            return
        with self._host.around(item, None):
            super().forward(item)
            i = self.plan.unit(item)
            kept = KeptByAutograd(self.store.take("graph", i, item.chunk))
            self.store.put("graph", i, kept, item.chunk)

    def result(self, item: Pass, *taken: Any) -> float:
        """Return a number that is mixed from all numbers that ``item`` has taken."""
        read = () if self._buckets is None else self._buckets.read(item)
        taken = (*taken, *self._taken_from_slice(item), *read)
        value = mix(item, self._place, *map(_number, taken))
        self._leave_for_slice(item, value)
        if self._buckets is not None:
            self._buckets.add(item, value)
        self.checksum = (self.checksum + value) % MODULUS
        if self._pacer is not None:
            self._pacer.in_turns(item)
        return value

    def _taken_from_slice(self, item: Pass) -> tuple[int, ...]:
        """Return what the F of the slice before has left (keys), or the B of the slice after."""
        before = item.slice - (1 if item.kind == "F" else -1)
        if item.kind not in ("F", "B") or not 0 <= before < self.plan.slices:
            return ()
        i = self.plan.unit(item._replace(slice=before))
        return (self.store.take(f"{item.kind} of a slice", i, item.chunk),)

    def _leave_for_slice(self, item: Pass, value: int) -> None:
        """Leave a number for the F of the slice after, or for the B of the slice before."""
        after = item.slice + (1 if item.kind == "F" else -1)
        if item.kind in ("F", "B") and 0 <= after < self.plan.slices:
            self.store.put(f"{item.kind} of a slice", self.plan.unit(item), value, item.chunk)

    def updated(self, bucket: int) -> int:
        """Return the number that U of a bucket leaves."""
        return mix(Pass("U", bucket), self._place)

    def merge(self, i: int, state: Any, statistics_p4n: Tensor) -> tuple[Merged, Tensor | None]:
        """As in ``Passes``."""
        merged = merge_statistics(statistics_p4n)
        if state.raw_gradient_nh is None:
            return merged, None
        microbatch, slice_ = divmod(i, self.plan.slices)
        item = Pass("T", microbatch, slice=slice_)
        number = mix(item, self._place, _number(state), _number(merged))
        return merged, self._all_tokens(i, number)


def _number(taken: Tensor | Merged | PlaceholderState | KeptByAutograd | float) -> int:
    """Return the number that a pass has taken."""
    if isinstance(taken, PlaceholderState):
        return int(taken.value)
    if isinstance(taken, Merged):
        taken = taken.sum_n
    if isinstance(taken, KeptByAutograd):
        return taken.read()
    return int(taken.view(-1)[0].item() if isinstance(taken, Tensor) else taken)
