"""Adds the gradient of one microbatch to the sum over microbatches, in full precision."""

import torch
from torch import Tensor

from megatron.layers.cpu_library import library_for

# PyTorch adds bf16 to fp32 on the CPU by way of an fp32 copy of the whole operand, 200 ms per 100M
# elements; in slices of this many elements the copy stays in the L2 cache: 55 ms, the speed of an
# fp32 addition (one core, 17 GB/s). The compiled function needs no copy.
CPU_SLICE_ELEMENTS = 1 << 17


def accumulate_(main_grad: Tensor, grad: Tensor) -> None:
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
