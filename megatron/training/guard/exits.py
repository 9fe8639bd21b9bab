"""Leaves a run before its end, or saves out of turn, on all ranks after the same iteration.

A signal, a time limit or a file can ask for an exit. A signal may reach one rank only, clocks
differ, and only rank 0 looks at files, so all ranks must agree. They exchange their wishes while
the next iteration runs: a wish at the end of an iteration is known to all ranks at the end of the
next iteration, and no rank waits.
"""

import signal
import time
from typing import Final, NamedTuple

import torch
import torch.distributed as dist

from megatron.parallel.groups import ConnectedAxis
from megatron.run.guard import GuardSettings
from megatron.training.exit_signals import ExitSignals

_NO_SIGNAL: Final = 0


class _Wishes(NamedTuple):
    """The wishes of a rank; for each wish the largest value of all ranks counts.

    Attributes:
        signal: number of a signal that the rank has received.
        is_over: whether the rank's time is over.
        file: whether the file of ``--kill-switch-path``, which ends the run, exists.
        exits: whether the folder of ``--trigger-path`` has a file ``exit``.
        saves: whether the folder of ``--trigger-path`` has a file ``save``.
    """

    signal: int = _NO_SIGNAL
    is_over: bool = False
    file: bool = False
    exits: bool = False
    saves: bool = False


class AgreedExit:
    """Tells at the end of every iteration whether the run leaves or saves, alike on every rank.

    ``begin`` is the time at which the process began, by ``time.monotonic``.
    """

    def __init__(
        self, config: GuardSettings, signals: ExitSignals, begin: float, hosts: ConnectedAxis
    ) -> None:
        self._config = config
        self._signals = signals
        self._begin = begin
        self._hosts = hosts
        self._asked: torch.Tensor | None = None
        self._work: dist.Work | None = None
        by_file = config.kill_switch_path, config.trigger_path
        self._is_used = any((config.exit_signals, config.exit_duration_in_mins, *by_file))

    def decide(self) -> tuple[str | None, bool]:
        """Return the reason to leave now, if any, and whether to save; all ranks call it."""
        if not self._is_used:
            return None, False
        wishes = self._wishes()
        if self._hosts.size == 1:
            return self._in_words(wishes), wishes.saves
        agreed, self._asked = self._agreed(), torch.tensor(wishes, dtype=torch.int64)
        self._work = dist.all_reduce(
            self._asked, dist.ReduceOp.MAX, group=self._hosts.group, async_op=True
        )
        if agreed is None:
            return None, False
        number, *others = agreed.tolist()
        wishes = _Wishes(number, *map(bool, others))
        return self._in_words(wishes), wishes.saves

    def close(self) -> None:
        """Wait until the other ranks have asked as often as this rank."""
        self._agreed()

    def _wishes(self) -> _Wishes:
        config, number = self._config, max(self._signals.received, default=_NO_SIGNAL)
        limit = config.exit_duration_in_mins
        is_over = limit is not None and time.monotonic() - self._begin > 60 * limit
        if self._hosts.rank:
            return _Wishes(number, is_over)
        file = config.kill_switch_path is not None and config.kill_switch_path.exists()
        return _Wishes(number, is_over, file, self._takes("exit"), self._takes("save"))

    def _takes(self, trigger: str) -> bool:
        """Return whether the folder of triggers has the file ``trigger``, and remove the file."""
        folder = self._config.trigger_path
        if folder is None:
            return False
        try:
            (folder / trigger).unlink()
        except OSError:  # the file is missing; or it stays, and would trigger again and again
            return False
        return True

    def _agreed(self) -> torch.Tensor | None:
        if self._work is None:
            return None
        self._work.wait()
        self._work = None
        return self._asked

    def _in_words(self, wishes: _Wishes) -> str | None:
        if wishes.signal != _NO_SIGNAL:
            return f"after {signal.Signals(wishes.signal).name} (--exit-signal-handler)"
        if wishes.is_over:
            minutes = self._config.exit_duration_in_mins
            return f"after {minutes:g} minutes (--exit-duration-in-mins)"
        if wishes.file:
            return f"because {self._config.kill_switch_path} is there (--kill-switch-path)"
        if wishes.exits:
            return f"because {self._config.trigger_path} had a file exit (--trigger-path)"
        return None
