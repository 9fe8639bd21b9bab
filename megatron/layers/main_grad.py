"""The full-precision sum of a parameter's gradients, by Megatron's name: ``parameter.main_grad``.

``megatron.optimizer.bucket`` gives every parameter one. PyTorch declares no such attribute:
it has its type here.
"""

from typing import Protocol, cast

from torch import Tensor


class _HasMainGrad(Protocol):
    main_grad: Tensor


def main_grad_of(parameter: Tensor) -> Tensor:
    """Return the buffer that a parameter's gradients add up in, of the parameter's shape."""
    return cast("_HasMainGrad", parameter).main_grad


def has_main_grad(parameter: Tensor) -> bool:
    """Whether gradients of ``parameter`` add up anywhere: not where nothing is trained."""
    return hasattr(parameter, "main_grad")


def give_main_grad(parameter: Tensor, main_grad: Tensor) -> None:
    """Let the gradients of ``parameter`` add up in ``main_grad``."""
    cast("_HasMainGrad", parameter).main_grad = main_grad
