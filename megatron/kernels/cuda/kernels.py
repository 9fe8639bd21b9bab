"""The kernels of a GPU, for activations of bf16, fp16 and fp32."""

import torch
from torch import Tensor

from megatron.kernels.autograd import apply
from megatron.kernels.cuda.gated import Gated
from megatron.kernels.cuda.output import CudaOutput
from megatron.kernels.cuda.products import Products
from megatron.kernels.reference.kernels import ReferenceKernels

TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of activations that the Triton programs take; their arithmetic is fp32."""


class CudaKernels(CudaOutput, ReferenceKernels):
    """PyTorch's operations where they are one kernel; see ``Kernels`` for what each computes.

    Args:
        device: where activations live.
        dtype: of activations, one of ``TYPES``.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        assert dtype in TYPES, dtype
        products = Products(device, dtype)
        CudaOutput.__init__(self, products)
        ReferenceKernels.__init__(self)
        self.accumulates_products = products.accumulates

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """See ``Kernels``."""
        return apply(Gated, gate_up, False)

    def geglu(self, gate_up: Tensor) -> Tensor:
        """See ``Kernels``."""
        return apply(Gated, gate_up, True)

    def accumulate_product_(
        self, total: Tensor, left: Tensor, right: Tensor, *, begins: bool = False
    ) -> None:
        """See ``Kernels``."""
        self._products.accumulate_(total, left, right, begins=begins)
