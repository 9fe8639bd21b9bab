"""Leaves a run before its end, by a signal or after a time, on all ranks after the same iteration.

A rank may get the signal alone, and clocks differ, so all ranks must agree. They do so beside the
next iteration: what was asked at the end of one is known at the end of the next, and no rank waits.
"""

import signal
import time
from types import FrameType
from typing import Final

import torch
import torch.distributed as dist

from megatron.config.run_config import GuardConfig
from megatron.parallel.groups import ConnectedAxis

_NO_SIGNAL: Final = 0


class ExitSignals:
    """Notes signals instead of dying of them; a signal handler itself.

    Args:
        names: of the signals, as in ``SIGTERM``.

    Attributes:
        received: those that have come so far.
    """

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self.received: set[signal.Signals] = set()
        for name in names:
            signal.signal(signal.Signals[name], self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note a signal."""
        self.received.add(signal.Signals(number))


def was_terminated() -> bool:
    """Return whether this process has got a SIGTERM that it has only noted."""
    handler = signal.getsignal(signal.SIGTERM)
    return isinstance(handler, ExitSignals) and signal.SIGTERM in handler.received


class AgreedExit:
    """Tells at the end of every iteration whether the run leaves, the same on every rank.

    Args:
        config: after which signals and which time.
        signals: of this rank.
        begin: when the process has begun, by ``time.monotonic``.
        hosts: all ranks of the job on CPUs.
    """

    def __init__(
        self, config: GuardConfig, signals: ExitSignals, begin: float, hosts: ConnectedAxis
    ) -> None:
        self._config = config
        self._signals = signals
        self._begin = begin
        self._hosts = hosts
        self._asked: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def reason(self) -> str | None:
        """Return why the run leaves now; ``None`` if it goes on. Every rank calls it in step."""
        if not self._config.exit_signals and self._config.exit_seconds is None:
            return None
        if self._hosts.size == 1:
            return self._in_words(self._wishes())
        agreed, self._asked = self._agreed(), self._wishes()
        self._work = dist.all_reduce(
            self._asked, dist.ReduceOp.MAX, group=self._hosts.group, async_op=True
        )
        return None if agreed is None else self._in_words(agreed)

    def close(self) -> None:
        """Wait until the other ranks have asked as often as this one."""
        self._agreed()

    def _wishes(self) -> torch.Tensor:
        """Return the number of a signal that this rank has got, and whether its time is over."""
        limit = self._config.exit_seconds
        is_over = limit is not None and time.monotonic() - self._begin > limit
        return torch.tensor([max(self._signals.received, default=_NO_SIGNAL), int(is_over)])

    def _agreed(self) -> torch.Tensor | None:
        if self._work is None:
            return None
        self._work.wait()
        self._work = None
        return self._asked

    def _in_words(self, wishes: torch.Tensor) -> str | None:
        number, is_over = wishes.tolist()
        if number != _NO_SIGNAL:
            return f"after {signal.Signals(number).name} (--exit-signal-handler)"
        if is_over:
            assert self._config.exit_seconds is not None
            minutes = self._config.exit_seconds / 60
            return f"after {minutes:g} minutes (--exit-duration-in-mins)"
        return None
