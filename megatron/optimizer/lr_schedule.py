"""The rates of a step as pure functions of the samples consumed so far.

As in Megatron's ``OptimizerParamScheduler``, the iteration that starts after ``n`` samples uses
``rates(config, n)``, so a warm-up makes its first step at ``lr_warmup_init``.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from megatron.optimizer.settings import OptimizerSettings

_REMAINING: Final[Mapping[str, Callable[[float], float]]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "exponential": lambda done: 2.0 * 0.5**done - 1.0,
    "minus_sqrt": lambda done: 1.0 - math.sqrt(done),
}
"""For every style, the remaining share of a decay (1 to 0) when a share of its span is done."""


@dataclass(frozen=True)
class Rates:
    """The rates of one step.

    Attributes:
        lr: learning rate.
        vocabulary_lr: learning rate of the input and the output layer.
        weight_decay: of the weights that decay.
        matrix_lr: learning rate of matrices inside the model; ``None``: ``lr``.
    """

    lr: float
    vocabulary_lr: float
    weight_decay: float
    matrix_lr: float | None = None


def rates(config: OptimizerSettings, consumed_samples: int) -> Rates:
    """Return the rates of the iteration that starts after ``consumed_samples`` samples.

    In the maximal update parametrisation (``width_mult`` w) the rate of matrices inside the model
    is ``config.lr`` / w with Adam. With SGD it is ``config.lr``, and the rate of all other weights
    ``config.lr`` · w (arXiv 2203.03466). A Muon update has a length of its own, by the matrix'
    shape, and its rate is not scaled. ``decoupled_lr`` is never scaled. A scaled rate also has a
    scaled floor, and begins its warm-up at the same ``lr_warmup_init``. All this is as in Megatron.
    """
    peak, floor = config.decoupled_lr, config.decoupled_min_lr
    others, matrices = _width_factors(config)

    def scaled(factor: float) -> float:
        return _rate(config, config.lr * factor, config.min_lr * factor, consumed_samples)

    vocabulary_lr = scaled(others)
    if peak is not None:
        floor = config.min_lr if floor is None else floor
        vocabulary_lr = _rate(config, peak, floor, consumed_samples)
    return Rates(
        lr=scaled(others),
        vocabulary_lr=vocabulary_lr,
        weight_decay=weight_decay(config, consumed_samples),
        matrix_lr=None if others == matrices else scaled(matrices),
    )


def _width_factors(config: OptimizerSettings) -> tuple[float, float]:
    """Return the factors of the rates of other weights, and of matrices inside the model."""
    width = config.width_mult
    if config.optimizer == "sgd":
        return width, 1.0
    return 1.0, 1.0 / width if config.optimizer == "adam" else 1.0


def learning_rate(config: OptimizerSettings, consumed_samples: int) -> float:
    """Return the learning rate after ``consumed_samples`` samples.

    The rate rises linearly from ``lr_warmup_init`` to ``lr`` during the warm-up. Then it stays
    (``constant``), or falls towards ``min_lr``, which is the rate after ``lr_decay_samples``. It
    falls along a line, along half a cosine, with the inverse square root of the samples, or
    (``WSD``, arXiv 2404.06395) only in the last ``lr_wsd_decay_samples`` of the span.

    Args:
        config: rates, style and spans, in samples.
        consumed_samples: samples of all finished iterations.

    Returns:
        The learning rate of the next iteration.
    """
    return _rate(config, config.lr, config.min_lr, consumed_samples)


def _rate(config: OptimizerSettings, peak: float, floor: float, consumed: int) -> float:
    warmup, style = config.lr_warmup_samples, config.lr_decay_style
    if warmup > 0 and consumed <= warmup:
        return config.lr_warmup_init + (peak - config.lr_warmup_init) * (consumed / warmup)
    if style == "constant":
        return peak
    if consumed > config.lr_decay_samples:
        return floor
    if style == "inverse-square-root":
        return max(floor, peak * math.sqrt(max(warmup, 1) / max(consumed, 1)))
    return floor + _remaining(config, consumed) * (peak - floor)


def _remaining(config: OptimizerSettings, consumed: int) -> float:
    """Return the remaining share of the decay after the warm-up, from 1 to 0."""
    style: str = config.lr_decay_style
    begin = config.lr_warmup_samples
    if style == "WSD":
        style, begin = (
            config.lr_wsd_decay_style,
            config.lr_decay_samples - config.lr_wsd_decay_samples,
        )
    if consumed <= begin:
        return 1.0
    return _REMAINING[style]((consumed - begin) / (config.lr_decay_samples - begin))


def weight_decay(config: OptimizerSettings, consumed_samples: int) -> float:
    """Return the weight decay after ``consumed_samples`` samples.

    The weight decay is constant, or goes from ``start_weight_decay`` at step 0 to
    ``end_weight_decay`` after ``weight_decay_samples``, along a line or half a cosine.

    Args:
        config: the decays, their style and their span.
        consumed_samples: samples of all finished iterations.

    Returns:
        The weight decay of the next iteration.
    """
    if config.weight_decay_incr_style == "constant":
        return config.weight_decay
    start, end = config.start_weight_decay, config.end_weight_decay
    assert start is not None
    assert end is not None
    done = min(1.0, consumed_samples / config.weight_decay_samples)
    return start + (1.0 - _REMAINING[config.weight_decay_incr_style](done)) * (end - start)
