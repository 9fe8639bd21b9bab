"""The full-precision sum of a parameter's gradients, by Megatron's name: ``parameter.main_grad``.

``megatron.optimizer.bucket`` gives every parameter one. A new sum begins by being *forgotten*,
without a write: the first gradient then overwrites what is there. Whoever comes first may be any of
those who share a parameter, as the output and the input layer do if embeddings are tied. PyTorch
declares no such attributes: they have their types here.
"""

from typing import Protocol, cast

from torch import Tensor


class _HasMainGrad(Protocol):
    main_grad: Tensor
    main_grad_is_forgotten: bool


def main_grad_of(parameter: Tensor) -> Tensor:
    """Return the sum of a parameter's gradients, of its shape; to add to it, or to read it."""
    main_grad, begins = take_main_grad(parameter)
    if begins:
        main_grad.zero_()
    return main_grad


def take_main_grad(parameter: Tensor) -> tuple[Tensor, bool]:
    """Return the sum for who adds to it now, and whether what it holds does not count.

    If so, the caller must overwrite all of it.
    """
    own = cast("_HasMainGrad", parameter)
    begins, own.main_grad_is_forgotten = own.main_grad_is_forgotten, False
    return own.main_grad, begins


def has_main_grad(parameter: Tensor) -> bool:
    """Whether gradients of ``parameter`` add up anywhere: not where nothing is trained."""
    return hasattr(parameter, "main_grad")


def give_main_grad(parameter: Tensor, main_grad: Tensor) -> None:
    """Let the gradients of ``parameter`` add up in ``main_grad``, beside what it holds."""
    own = cast("_HasMainGrad", parameter)
    own.main_grad, own.main_grad_is_forgotten = main_grad, False


def forget_main_grad(parameter: Tensor) -> None:
    """Begin a new sum of a parameter's gradients."""
    cast("_HasMainGrad", parameter).main_grad_is_forgotten = True
