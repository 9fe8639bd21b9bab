"""Norms of a residual stream in fp32, where parameters and the layers' activations have 16 bits."""

import torch
from torch import Tensor

from megatron.kernels.choose import kernels_for
from megatron.kernels.face import Kernels
from megatron.kernels.reference.kernels import ReferenceKernels


class WideNorms(ReferenceKernels):
    """Norms of fp32 activations, with results in the type of the parameters.

    Args:
        device: where the stream lives.
        kernels: kernels that form the norms in fp32; ``None``: the fastest ones for the device.
    """

    def __init__(self, device: torch.device, kernels: Kernels | None = None) -> None:
        super().__init__()
        self._wide = kernels or kernels_for(device, torch.float32)

    def layer_norm(self, x: Tensor, weight_h: Tensor, bias_h: Tensor, epsilon: float) -> Tensor:
        """See ``Kernels``; the result has the type of ``weight_h``."""
        parameters = weight_h.to(x.dtype), bias_h.to(x.dtype)
        return self._wide.layer_norm(x, *parameters, epsilon).to(weight_h.dtype)

    def rms_norm(self, x: Tensor, weight_h: Tensor, epsilon: float) -> Tensor:
        """See ``Kernels``; the result has the type of ``weight_h``."""
        return self._wide.rms_norm(x, weight_h.to(x.dtype), epsilon).to(weight_h.dtype)
