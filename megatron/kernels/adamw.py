"""What a step of AdamW on many tensors is given (arXiv 1711.05101)."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AdamWTensors:
    """Tensors that are updated together; the k-th of each are of one shape, and contiguous.

    Attributes:
        gradients: all of one type.
        masters: weights in full precision.
        moments: means of the gradients, all of one type.
        squares: means of their squares, all of one type.
        weights: to which the masters are rounded, all of one type; empty: nothing is.
        decays: whether the weight decay applies.
        in_vocabulary: whether the rate is that of the vocabulary layers.
    """

    gradients: Sequence[Tensor]
    masters: Sequence[Tensor]
    moments: Sequence[Tensor]
    squares: Sequence[Tensor]
    weights: Sequence[Tensor]
    decays: Sequence[bool]
    in_vocabulary: Sequence[bool]


@dataclass(frozen=True)
class AdamWStep:
    """Numbers of a step.

    Attributes:
        divisors: of the gradients, one after the other; each quotient has the gradients' type.
        keeps_quotients: whether the last quotient takes the gradient's place, or nothing does.
        lr: learning rate.
        vocabulary_lr: that of the vocabulary layers.
        weight_decay: per unit of the learning rate.
        betas: shares of the means that stay.
        epsilon: added to the root of the second mean.
        number: of the step, from 1.
    """

    divisors: tuple[float, ...]
    keeps_quotients: bool
    lr: float
    vocabulary_lr: float
    weight_decay: float
    betas: tuple[float, float]
    epsilon: float
    number: int

    @property
    def both_divisors(self) -> tuple[float, float]:
        """Two of them, of which some may be 1."""
        first, second = (*self.divisors, 1.0, 1.0)[:2]
        return first, second
