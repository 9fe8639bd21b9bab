"""Optimizer and learning-rate settings, resolved once at the entrypoint."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, clipping and the learning-rate schedule; steps are counted in samples.

    Attributes:
        lr: peak learning rate.
        min_lr: final learning rate.
        lr_decay_style: ``constant``, ``linear`` or ``cosine`` after the warm-up.
        lr_decay_samples: samples over which the rate decays (warm-up included).
        lr_warmup_samples: samples of linear warm-up.
        lr_warmup_init: learning rate at step 0.
        weight_decay: decoupled decay, not applied to biases and one-dimensional parameters.
        adam_beta1: first-moment decay.
        adam_beta2: second-moment decay.
        adam_eps: added to the root of the second moment.
        clip_grad: limit of the global gradient norm; 0 switches clipping off.
        post_validation: step on the norm over the ranks up to this one, and step again if that
            turns out wrong (``megatron.optimizer.post_validation``).
    """

    lr: float
    min_lr: float = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine"] = "linear"
    lr_decay_samples: int = 1
    lr_warmup_samples: int = 0
    lr_warmup_init: float = 0.0
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    post_validation: bool = False
