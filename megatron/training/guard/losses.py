"""Looks at the losses of a run: tells of spikes and of iterations without a step, by samples."""

import math
from collections.abc import Iterator
from typing import Final

from megatron.training.guard.words import samples_in_words
from megatron.training.step import Finished

SPIKE: Final = 10.0
"""A loss is spiky if it is so many times the largest before it, as in Megatron-LM."""


class LossWatch:
    """Follows the losses of one launch.

    Args:
        tells_spikes: whether spikes are told.
    """

    def __init__(self, tells_spikes: bool) -> None:
        self._tells_spikes = tells_spikes
        self._largest = 0.0

    def remarks(self, finished: Finished | None) -> Iterator[str]:
        """Yield what is to be said about an iteration that has become final."""
        if finished is None:
            return
        where = samples_in_words(finished.samples)
        if finished.is_skipped:
            yield (
                f"iteration {finished.number + 1}: lm loss {finished.loss}, grad norm "
                f"{finished.grad_norm}: no step was taken; {where}{_scale_in_words(finished)}"
            )
        if not math.isfinite(finished.loss):
            return
        if self._tells_spikes and 0 < self._largest <= finished.loss / SPIKE:
            yield (
                f"iteration {finished.number + 1}: lm loss {finished.loss:.6E} is at least "
                f"{SPIKE:g} times the largest before it, {self._largest:.6E}; {where}"
            )
        else:
            self._largest = max(self._largest, finished.loss)


def _scale_in_words(finished: Finished) -> str:
    scale = finished.loss_scale
    return "" if scale is None else f"; the loss scale is {scale:.1f} now"
