"""Watches losses and gradients: reports spikes and iterations without a step, with the samples."""

import math
from collections.abc import Iterator
from typing import Final

from megatron.run.guard import GuardSettings
from megatron.training.step import Finished
from megatron.training.words import samples_in_words

SPIKE: Final = 10.0
"""A loss or norm is a spike from this many times the largest before it, as in Megatron-LM."""


class LossWatch:
    """Follows the losses of one launch."""

    def __init__(self, config: GuardSettings) -> None:
        self._config = config
        self._largest = {"lm loss": 0.0, "grad norm": 0.0}

    def remarks(self, finished: Finished | None) -> Iterator[str]:
        """Yield remarks about an iteration that has become final."""
        if finished is None:
            return
        where = samples_in_words(finished.samples)
        if finished.is_skipped:
            yield (
                f"iteration {finished.number + 1}: lm loss {finished.loss}, grad norm "
                f"{finished.grad_norm}: no step was taken; {where}{_scale_in_words(finished)}"
            )
        for name, value, is_told in (
            ("lm loss", finished.loss, self._config.check_for_spiky_loss),
            ("grad norm", finished.grad_norm, self._config.check_for_large_grads),
        ):
            largest = self._largest[name]
            if is_told and math.isfinite(value) and 0 < largest <= value / SPIKE:
                yield (
                    f"iteration {finished.number + 1}: {name} {value:.6E} is at least {SPIKE:g} "
                    f"times the largest before it, {largest:.6E}; {where}"
                )
            elif math.isfinite(value):
                self._largest[name] = max(largest, value)


def _scale_in_words(finished: Finished) -> str:
    scale = finished.loss_scale
    return "" if scale is None else f"; the loss scale is {scale:.1f} now"
