"""Notes how large the results of PyTorch's operations are."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestResult(TorchDispatchMode):
    """Notes the most elements that the result of an operation has.

    Args:
        dtype: of the results that count; ``None``: all.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # TorchDispatchMode has no types
        self.elements = 0
        self._dtype = dtype

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor) and self._dtype in (None, tensor.dtype):
                self.elements = max(self.elements, tensor.numel())
        return result
