"""PyTorch's way to run a function with a backward of its own, at less cost for the host.

PyTorch's ``Function.apply`` looks through its arguments for wrappers of ``torch.func``, and its
``once_differentiable`` enters a context for every backward. Nothing here runs under ``torch.func``,
and nothing is differentiated twice: a layer has seven such functions, and the host saves some
microseconds in each.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_RECORDED: Final[Callable[..., Any]] = vars(torch._C._FunctionBase)["apply"]
"""What ``Function.apply`` calls after its look through the arguments."""


def apply(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    """Run ``function`` on what its ``forward`` takes after the context, and have it recorded.

    Args:
        function: its ``forward`` returns one tensor.
        arguments: tensors, and whatever else that ``forward`` takes.
    """
    result: Tensor = _RECORDED(function, *arguments)
    return result


def apply_all(function: type[torch.autograd.Function], *arguments: object) -> tuple[Tensor, ...]:
    """As ``apply``, for a ``forward`` that returns several tensors."""
    results: tuple[Tensor, ...] = _RECORDED(function, *arguments)
    return results


def once_differentiable(backward: Callable[..., T]) -> Callable[..., T]:
    """Return a ``backward`` that refuses to be recorded, as its gradients have none themselves."""

    @wraps(backward)
    def checked(ctx: Any, *gradients: Tensor | None) -> T:
        if torch.is_grad_enabled():  # autograd enables it with create_graph alone
            raise RuntimeError(f"{backward.__qualname__} cannot be differentiated itself")
        return backward(ctx, *gradients)

    return checked
