"""One clock for all ranks: how far every host's monotonic clock is ahead of rank 0's.

Each host's clock starts at a moment of its own. Rank 0 asks every rank for its time, and assumes
that the answer was given in the middle of the round trip (as in NTP, RFC 5905). The true offset
differs from this estimate by at most half the round trip. If zero lies within this error, the
offset is taken as zero, because processes of one machine share a clock. Clocks that drift apart by
parts per million during an iteration are not corrected.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from megatron.parallel.groups import ConnectedAxis, Groups

ROUNDS: Final = 10
"""Round trips with each rank; the quickest counts."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class Offset:
    """How far a rank's clock is ahead of rank 0's.

    Attributes:
        seconds: the offset.
        error: bound of the offset's error, in seconds.
    """

    seconds: float = 0.0
    error: float = 0.0


def clock_offset(hosts: ConnectedAxis, clock: Clock = time.perf_counter) -> Offset:
    """Return the offset of this rank's ``clock``; every rank calls it, outside the schedule.

    ``hosts`` is the axis of all ranks of the job, with messages between CPUs.
    """
    offset = Offset()
    for other in range(1, hosts.size):
        if hosts.rank == 0:
            best = min((_ask(hosts, other, clock) for _ in range(ROUNDS)), key=lambda o: o.error)
            _send(hosts, other, best.seconds, best.error)
        elif hosts.rank == other:
            for _ in range(ROUNDS):
                _receive(hosts, 0)
                _send(hosts, 0, clock())
            offset = Offset(*_receive(hosts, 0))
    return offset if abs(offset.seconds) > offset.error else Offset(0.0, offset.error)


def _ask(hosts: ConnectedAxis, other: int, clock: Clock) -> Offset:
    asked = clock()
    _send(hosts, other)
    theirs, _ = _receive(hosts, other)
    answered = clock()
    return Offset(theirs - (asked + answered) / 2, (answered - asked) / 2)


def _send(hosts: ConnectedAxis, rank: int, first: float = 0.0, second: float = 0.0) -> None:
    message = torch.tensor([first, second], dtype=torch.float64)
    dist.send(message, group=hosts.group, group_dst=rank)


def _receive(hosts: ConnectedAxis, rank: int) -> tuple[float, float]:
    message = torch.empty(2, dtype=torch.float64)
    dist.recv(message, group=hosts.group, group_src=rank)
    first, second = message.tolist()
    return first, second


def common_start(groups: Groups, clock: Clock = time.perf_counter) -> tuple[float, Offset]:
    """Return a moment that has just passed, in this rank's time, and this rank's offset.

    The moment is the same on every rank, up to the errors of the offsets. Every rank calls this
    function.
    """
    offset = clock_offset(groups.world_hosts, clock)
    start = groups.world.all_gather_object(clock())[0]
    return start + offset.seconds, offset
