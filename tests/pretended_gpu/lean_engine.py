"""Transformer Engine on GPUs that are not there: what it allocates of its own, and what it reads.

The stand-in of other tests computes with fp32 in between, which the package does not.
"""

from typing import Any

import torch
from kernels.engine_stand_in import DType, Float8Quantizer, Float8TensorStorage
from torch import Tensor


class LeanQuantizer(Float8Quantizer):
    """A scale that is known, on Hopper: rows and columns in 8 bits."""

    def quantize(self, tensor: Tensor) -> Float8TensorStorage:
        """Read the matrix, and write it in both layouts."""
        bits = tensor.to(torch.uint8) if self.rowwise_usage else None
        turned = None
        if self.columnwise_usage:
            turned = torch.empty_like(tensor.T, dtype=torch.uint8).copy_(tensor.T)
        return Float8TensorStorage(
            data=bits,
            fp8_scale_inv=1 / self.scale,
            fp8_dtype=self.dtype,
            data_transpose=turned,
            quantizer=self,
        )


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: object,
    quantizer: LeanQuantizer,
    otype: DType,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Read the matrix and write its norm in 8 bits."""
    inverse = torch.empty(len(input), dtype=torch.float32, device=input.device)
    return [quantizer.quantize(input), None, inverse]


def general_gemm(
    A: Float8TensorStorage,
    B: Float8TensorStorage,
    *,
    out_dtype: torch.dtype,
    layout: str,
    out: Tensor | None,
    bias: Tensor | None,
    accumulate: bool,
    use_split_accumulator: bool,
    grad: bool,
) -> tuple[Tensor, None, None, None]:
    """Write the product of the rows or columns that the package's takes."""
    left = B.data_transpose if layout[1] == "T" else B.data
    right = A.data if layout[0] == "T" else A.data_transpose
    assert left is not None
    assert right is not None
    shape = len(left), len(right)
    if out is None:
        return left.new_empty(shape, dtype=out_dtype), None, None, None
    assert out.shape == shape
    return out.add_(1) if accumulate else out.fill_(1), None, None, None
