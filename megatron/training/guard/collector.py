"""Decides when Python's garbage collector runs.

The collector stops its rank, and all ranks wait for the slowest rank. So the collector does not
look at objects that were made before the first iteration (``gc.freeze``). With ``--manual-gc`` all
ranks collect after the same iterations.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Collector:
    """Decides when garbage is collected.

    Attributes:
        interval: iterations from one collection to the next; 0: no collection after iterations;
            ``None``: Python's own thresholds decide.
        around_evaluations: with an interval, also collect before and after every evaluation and
            before and after texts.
    """

    interval: int | None = None
    around_evaluations: bool = True

    @contextmanager
    def running(self) -> Iterator[None]:
        """Collect by these rules in this context; afterwards the earlier rules hold again."""
        was_enabled = gc.isenabled()
        gc.collect()  # skips what imports have made, which is frozen already (``in_environment``)
        gc.freeze()
        if self.interval is not None:
            gc.disable()
        try:
            yield
        finally:
            gc.unfreeze()
            if was_enabled:
                gc.enable()

    def settle(self) -> None:
        """Free all garbage, and make later collections skip the objects that remain.

        Call this again after large objects were replaced: otherwise old objects that refer to each
        other would stay for ever.
        """
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    def ended(self, iteration: int) -> None:
        """Collect if it is the turn of ``iteration``, counted from 0."""
        if self.interval and (iteration + 1) % self.interval == 0:
            gc.collect()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Collect before and after the evaluation, or the texts, that run in this context."""
        collects = self.interval is not None and self.around_evaluations
        if collects:
            gc.collect()
        yield
        if collects:
            gc.collect()
