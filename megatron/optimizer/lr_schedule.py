"""The learning rate as a pure function of the samples consumed so far.

The meaning is that of Megatron's scheduler: the iteration that starts after ``n`` samples uses
``learning_rate(config, n)``, so a warm-up makes its first step at ``lr_warmup_init``.
"""

import math

from megatron.optimizer.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, consumed_samples: int) -> float:
    """The rate after ``consumed_samples`` samples.

    Linear from ``lr_warmup_init`` to ``lr`` over the warm-up; then ``lr`` for ever (``constant``)
    or down to ``min_lr``, reached at ``lr_decay_samples`` and kept from there on.

    Args:
        config: rates, style and spans, in samples.
        consumed_samples: samples of all finished iterations.

    Returns:
        The learning rate of the next iteration.
    """
    warmup = config.lr_warmup_samples
    if warmup > 0 and consumed_samples <= warmup:
        return config.lr_warmup_init + (config.lr - config.lr_warmup_init) * (
            consumed_samples / warmup
        )
    if config.lr_decay_style == "constant":
        return config.lr
    if consumed_samples >= config.lr_decay_samples:
        return config.min_lr
    progress = (consumed_samples - warmup) / (config.lr_decay_samples - warmup)
    remaining = (
        1.0 - progress
        if config.lr_decay_style == "linear"
        else 0.5 * (1.0 + math.cos(math.pi * progress))
    )
    return config.min_lr + remaining * (config.lr - config.min_lr)
