"""PyTorch's way to run a function with a backward of its own, at less cost for the host.

PyTorch's ``Function.apply`` looks through its arguments for wrappers of ``torch.func``, and its
``once_differentiable`` enters a context for every backward. Both cost the host some microseconds,
and a layer has seven such functions. Nothing here runs under ``torch.func``, and nothing is
differentiated twice, so the functions below do without both.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_RECORDED: Final[Callable[..., Any]] = vars(torch._C._FunctionBase)["apply"]
"""The function that ``Function.apply`` calls after it has searched the arguments for wrappers."""


def apply(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    """Run ``function`` on ``arguments`` and let autograd record it, as ``Function.apply`` does.

    Args:
        function: its ``forward`` returns one tensor.
        arguments: all arguments of ``forward`` after the context.
    """
    result: Tensor = _RECORDED(function, *arguments)
    return result


def apply_all(function: type[torch.autograd.Function], *arguments: object) -> tuple[Tensor, ...]:
    """As ``apply``, for a ``forward`` that returns several tensors."""
    results: tuple[Tensor, ...] = _RECORDED(function, *arguments)
    return results


def once_differentiable(backward: Callable[..., T]) -> Callable[..., T]:
    """Return a ``backward`` that raises an error if it is to be differentiated itself."""

    @wraps(backward)
    def checked(ctx: Any, *gradients: Tensor | None) -> T:
        if torch.is_grad_enabled():  # as autograd does for create_graph=True
            raise RuntimeError(f"{backward.__qualname__} cannot be differentiated itself")
        return backward(ctx, *gradients)

    return checked
