"""PyTorch's way to run a function with a backward of its own, with the type that it leaves out."""

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


def apply_to_both(
    function: type[torch.autograd.Function], *arguments: object
) -> tuple[Tensor, Tensor]:
    """As ``apply``, of a ``forward`` that returns two tensors."""
    both: tuple[Tensor, Tensor] = function.apply(*arguments)
    return both
