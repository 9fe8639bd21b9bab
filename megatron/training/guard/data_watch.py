"""Checks during a run that its corpora are as they were when it began."""

import time
from collections.abc import Callable
from typing import Final

from megatron.data.corpus_watch import CorpusWatch
from megatron.training.rendezvous import UserError

AT_MOST_EVERY: Final = 10.0
"""Seconds between the checks of two epochs: a small corpus may begin anew in every iteration."""

SHARE: Final = 100
"""A check waits for as many times the last check's seconds: a hundredth of the time at most."""


class DataWatch:
    """Checks the corpora of a run on this rank, at the start of every epoch and before every save.

    All ranks compare sizes and times. Ranks that have sampled the corpora compare content.

    Args:
        corpora: the files.
        say: prints on the first rank.
    """

    def __init__(self, corpora: CorpusWatch, say: Callable[[str], None]) -> None:
        self._corpora, self._say = corpora, say
        self._epoch: int | None = None
        self._checked = time.monotonic()
        self._took = 0.0

    def is_due(self, consumed: int) -> bool:
        """Return whether an epoch has begun since the last call, so that it is time for a check.

        Args:
            consumed: samples that the run has read.
        """
        epoch = consumed // self._corpora.epoch
        begun, self._epoch = self._epoch not in (None, epoch), epoch
        pause = max(AT_MOST_EVERY, SHARE * self._took)
        return begun and time.monotonic() - self._checked >= pause

    def check(self) -> None:
        """Check the files.

        Raises:
            UserError: a file has changed.
        """
        begun = time.monotonic()
        try:
            for line in self._corpora.check():
                self._say(line)
        except ValueError as error:
            raise UserError(str(error)) from error
        self._checked = time.monotonic()
        self._took = self._checked - begun
