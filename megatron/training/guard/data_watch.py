"""Checks during a run that its corpora are as they were when it began."""

import os
import time
from collections.abc import Callable
from typing import Final

from megatron.data.corpus_watch import CorpusWatch
from megatron.training.rendezvous import UserError

AT_MOST_EVERY: Final = 10.0
"""Seconds between the checks of two epochs: a small corpus may begin anew in every iteration."""


class DataWatch:
    """Checks the corpora of a run on this rank, at the start of every epoch and before every save.

    All ranks compare sizes and times. The first rank of every machine compares content.

    Args:
        corpora: the files.
        say: prints on the first rank.
        local_rank: number of this rank on its machine; ``None``: as the launcher says.
    """

    def __init__(
        self, corpora: CorpusWatch, say: Callable[[str], None], local_rank: int | None = None
    ) -> None:
        self._corpora, self._say = corpora, say
        rank = int(os.environ.get("LOCAL_RANK") or 0) if local_rank is None else local_rank
        self._compares_content = rank == 0
        self._epoch: int | None = None
        self._checked = time.monotonic()

    def is_due(self, consumed: int) -> bool:
        """Return whether an epoch has begun since the last call, so that it is time for a check.

        Args:
            consumed: samples that the run has read.
        """
        epoch = consumed // self._corpora.epoch
        begun, self._epoch = self._epoch not in (None, epoch), epoch
        return begun and time.monotonic() - self._checked >= AT_MOST_EVERY

    def check(self) -> None:
        """Check the files.

        Raises:
            UserError: a file has changed.
        """
        try:
            for line in self._corpora.check(content=self._compares_content):
                self._say(line)
        except ValueError as error:
            raise UserError(str(error)) from error
        self._checked = time.monotonic()
