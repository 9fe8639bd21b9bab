"""The tensors and the numbers that a step of AdamW takes (arXiv 1711.05101)."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AdamWTensors:
    """Contiguous tensors that one step updates; the k-th tensors of all lists have one shape.

    Attributes:
        gradients: gradients of the weights, all of one type.
        masters: weights in full precision.
        moments: running means of the gradients, all of one type.
        squares: running means of the squared gradients, all of one type.
        weights: tensors that take the rounded masters, all of one type; empty: nothing is rounded.
        decays: for every tensor, whether the weight decay applies.
        in_vocabulary: for every tensor, whether it has the vocabulary layers' learning rate.
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
    """The numbers of one step.

    Attributes:
        divisors: at most two numbers, which divide the gradients one after the other. Each quotient
            has the type of the gradients.
        keeps_quotients: whether the last quotient replaces the gradient; otherwise the gradient
            stays.
        lr: learning rate.
        vocabulary_lr: learning rate of the vocabulary layers.
        weight_decay: weight decay, which is multiplied by the learning rate.
        betas: shares of the two running means that a step keeps.
        epsilon: added to the root of the mean square.
        number: number of the step, from 1.
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
        """Two divisors: ``divisors``, filled up with 1."""
        first, second = (*self.divisors, 1.0, 1.0)[:2]
        return first, second
