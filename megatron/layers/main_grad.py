"""The full-precision sum of a parameter's gradients, by Megatron's name: ``parameter.main_grad``.

``megatron.optimizer.bucket`` gives every parameter a ``main_grad``. A new sum begins when the old
sum is *forgotten*: nothing is written, but the next gradient will overwrite the old sum. That
gradient may come from any layer that uses the parameter: tied embeddings belong to the input and
the output layer. PyTorch does not declare these attributes, so this file declares their types.
"""

from typing import Protocol, cast

from torch import Tensor


class _HasMainGrad(Protocol):
    main_grad: Tensor
    main_grad_is_forgotten: bool


def main_grad_of(parameter: Tensor) -> Tensor:
    """Return the tensor in which a parameter's gradients add up; it has the parameter's shape.

    The caller may read it or add to it. If the sum was forgotten (``forget_main_grad``), it is set
    to zero first.
    """
    main_grad, begins = take_main_grad(parameter)
    if begins:
        main_grad.zero_()
    return main_grad


def take_main_grad(parameter: Tensor) -> tuple[Tensor, bool]:
    """Return the sum of gradients, and whether it was forgotten, to a caller that adds to it now.

    The values of a forgotten sum mean nothing, so the caller must overwrite all of it.
    """
    own = cast("_HasMainGrad", parameter)
    begins, own.main_grad_is_forgotten = own.main_grad_is_forgotten, False
    return own.main_grad, begins


def has_main_grad(parameter: Tensor) -> bool:
    """Return whether ``parameter`` has a sum of gradients; without training it has none."""
    return hasattr(parameter, "main_grad")


def give_main_grad(parameter: Tensor, main_grad: Tensor) -> None:
    """Let the gradients of ``parameter`` add to ``main_grad``, including its present values."""
    own = cast("_HasMainGrad", parameter)
    own.main_grad, own.main_grad_is_forgotten = main_grad, False


def forget_main_grad(parameter: Tensor) -> None:
    """Begin a new sum of a parameter's gradients."""
    cast("_HasMainGrad", parameter).main_grad_is_forgotten = True
