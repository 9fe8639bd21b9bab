"""PyTorch's way to run a function with a backward of its own, with the types that it leaves out."""

import torch
from torch import Tensor


def apply(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    """Run ``function`` on what its ``forward`` takes after the context, and have it recorded.

    Args:
        function: its ``forward`` returns one tensor.
        arguments: tensors, and whatever else that ``forward`` takes.
    """
    result: Tensor = function.apply(*arguments)
    return result


def apply_all(function: type[torch.autograd.Function], *arguments: object) -> tuple[Tensor, ...]:
    """As ``apply``, for a ``forward`` that returns several tensors."""
    results: tuple[Tensor, ...] = function.apply(*arguments)
    return results
