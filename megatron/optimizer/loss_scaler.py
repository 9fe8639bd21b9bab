"""The loss scale of fp16, by Megatron-LM's rule.

fp16 has no normal numbers below 2^-14, and most gradients of activations are smaller. So the loss
is multiplied by a scale. All gradients are then multiplied by the scale too, and the optimizer's
step divides by it. If the scale is too large, a gradient overflows. An iteration with an overflow
takes no step. After a few overflows the scale is halved; after many iterations without one it is
doubled (arXiv 1710.03740, section 3.2).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final

from megatron.optimizer.settings import LossScaleSettings

GROWTH: Final = 2.0
BACKOFF: Final = 0.5

_WITHOUT_STEP: Final = "samples_without_step"


@dataclass(frozen=True)
class LossScale:
    """A loss scale, and the counters that decide its next change.

    Attributes:
        scale: factor of the loss.
        good_steps: steps since the last overflow or growth.
        tolerance: number of overflows until the scale shrinks; from then on every overflow shrinks
            it. Only a growth resets the tolerance, so the overflows need not be consecutive.
        samples_without_step: samples of all iterations that took no step, for whatever reason.
            Megatron's rate schedules do not count these samples, with or without fp16.
    """

    scale: float
    good_steps: int
    tolerance: int
    samples_without_step: int = 0


class LossScaler:
    """Updates the loss scale after every iteration, in the same way on every rank.

    Args:
        config: how the scale changes; ``None``: losses are not scaled.

    Attributes:
        state: the scale of the next iteration; checkpoints keep it.
    """

    def __init__(self, config: LossScaleSettings | None) -> None:
        self._config = config
        self.state = LossScale(1.0, 0, 1)
        if config is not None:
            scale = config.initial_loss_scale if config.loss_scale is None else config.loss_scale
            self.state = LossScale(scale, 0, config.hysteresis)

    @property
    def is_active(self) -> bool:
        """Whether losses are scaled, so that an overflow says nothing about the model."""
        return self._config is not None

    def after(self, finite: bool, samples: int) -> LossScale:
        """Return the state after one more iteration.

        Args:
            finite: whether loss and gradients of the whole model are finite, so that a step is
                taken.
            samples: number of samples of the iteration.
        """
        config, state = self._config, self.state
        if not finite:
            state = _without_step(state, samples)
        if config is None or config.loss_scale is not None:
            return state
        return _grown(state, config) if finite else _shrunk(state, config)

    def update(self, finite: bool, samples: int) -> None:
        """Count one more iteration; arguments as of ``after``."""
        self.state = self.after(finite, samples)

    def pass_over(self, samples: int) -> None:
        """Count the samples of an iteration that is skipped: it says nothing about the scale."""
        self.state = _without_step(self.state, samples)

    def saved(self) -> dict[str, float]:
        """Return the state for a checkpoint; without a scale if losses are not scaled."""
        if self.is_active:
            return asdict(self.state)
        return {_WITHOUT_STEP: self.state.samples_without_step}

    def load(self, saved: Mapping[str, float] | None, *, with_scale: bool = True) -> None:
        """Continue from the state in a checkpoint; a constant scale does not change.

        Args:
            saved: result of ``saved``, possibly of a run that scaled no losses; ``None``: of a run
                that counted nothing.
            with_scale: whether the scale and its counters are read too.
        """
        if saved is None:
            return
        if self._config is None or not with_scale or "scale" not in saved:
            self.state = replace(self.state, samples_without_step=int(saved[_WITHOUT_STEP]))
            return
        loaded = LossScale(
            float(saved["scale"]),
            int(saved["good_steps"]),
            int(saved["tolerance"]),
            int(saved[_WITHOUT_STEP]),
        )
        if self._config.loss_scale is not None:
            loaded = replace(loaded, scale=self._config.loss_scale)
        self.state = loaded


def _without_step(state: LossScale, samples: int) -> LossScale:
    return replace(state, samples_without_step=state.samples_without_step + samples)


def _shrunk(state: LossScale, config: LossScaleSettings) -> LossScale:
    tolerance = state.tolerance - 1
    scale = state.scale if tolerance > 0 else max(state.scale * BACKOFF, config.min_loss_scale)
    return replace(state, scale=scale, good_steps=0, tolerance=tolerance)


def _grown(state: LossScale, config: LossScaleSettings) -> LossScale:
    good_steps = state.good_steps + 1
    if good_steps < config.loss_scale_window:
        return replace(state, good_steps=good_steps)
    return replace(state, scale=state.scale * GROWTH, good_steps=0, tolerance=config.hysteresis)
