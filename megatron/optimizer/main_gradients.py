"""Gradients summed over microbatches in full precision, without a second copy where one is enough.

Every parameter gets a ``main_grad``: the buffer that the passes add to and the optimizer reads.
Under bf16 it is fp32, and a hook moves what autograd leaves in ``.grad`` into it at once, so that
at most one layer's bf16 gradient is alive. In fp32 it *is* ``.grad``: autograd adds in place.
"""

from collections.abc import Sequence

import torch
from torch import nn

from megatron.layers.cpu_library import library_for

# PyTorch adds bf16 to fp32 on the CPU by way of an fp32 copy of the whole operand, 200 ms per 100M
# elements; in slices of this many elements the copy stays in the L2 cache: 55 ms, the speed of an
# fp32 addition (one core, 17 GB/s). The compiled function needs no copy.
CPU_SLICE_ELEMENTS = 1 << 17


def accumulate_(main_grad: torch.Tensor, grad: torch.Tensor) -> None:
    """Add ``grad`` to ``main_grad`` in place.

    Args:
        main_grad: the sum so far, fp32 (or ``grad``'s dtype), any shape with a first dimension.
        grad: the addend, of the same shape and of any floating-point dtype.
    """
    if grad.device.type != "cpu" or grad.dtype == main_grad.dtype:
        main_grad.add_(grad)
        return
    library = library_for(grad)
    contiguous = main_grad.is_contiguous() and grad.is_contiguous()
    if library is not None and contiguous and main_grad.dtype == torch.float32:
        library.add_bf16(main_grad.data_ptr(), grad.data_ptr(), grad.numel())
        return
    elements_per_row = max(1, grad.numel() // max(1, grad.shape[0]))
    rows = max(1, CPU_SLICE_ELEMENTS // elements_per_row)
    for main_slice, grad_slice in zip(main_grad.split(rows), grad.split(rows), strict=True):
        main_slice.add_(grad_slice)


class MainGradients:
    """Gives every parameter of a rank its zeroed ``main_grad`` and keeps it fed by autograd.

    Passes that form weight gradients themselves (T, IB) add to ``parameter.main_grad`` directly.

    Args:
        parameters: the parameters, each once. fp32 and fp64 parameters get a ``main_grad`` of
            their dtype, shared with ``.grad``, which must then never be set to ``None``.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        assert len({id(p) for p in parameters}) == len(parameters), "a parameter is listed twice"
        self._main_grads = []
        for parameter in parameters:
            full_precision = parameter.dtype in (torch.float32, torch.float64)
            dtype = parameter.dtype if full_precision else torch.float32
            main_grad = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            parameter.main_grad = main_grad
            if full_precision:
                parameter.grad = main_grad
            else:
                parameter.register_post_accumulate_grad_hook(_move_to_main_grad)
            self._main_grads.append(main_grad)

    def zero(self) -> None:
        """Start a new sum: once per iteration, after the optimizer's step."""
        torch._foreach_zero_(self._main_grads)


def _move_to_main_grad(parameter: torch.Tensor) -> None:
    """Add the gradient that autograd has just left in ``.grad`` and free it."""
    assert parameter.grad is not None
    accumulate_(parameter.main_grad, parameter.grad)
    parameter.grad = None
