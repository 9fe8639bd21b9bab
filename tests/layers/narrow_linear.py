"""A linear layer whose products are of few bits, and one microbatch through it."""

from typing import Any

import torch
from optimizer.entries import entries
from torch import Tensor

from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.layers.linear import Linear, Way
from megatron.layers.products import Products
from megatron.layers.site import Site
from megatron.optimizer.bucket import Bucket
from megatron.parallel.tensor import ALONE, TensorParallel

CPU = torch.device("cpu")
KERNELS = ReferenceKernels()


def linear(
    features: tuple[int, int],
    products: Products[Any],
    *,
    bias: bool = True,
    tensor: TensorParallel = ALONE,
    parallel: Way | None = None,
    device: torch.device = CPU,
) -> Linear:
    """Return a layer with main gradients, and weights of a seed.

    Args:
        features: in and out, of a rank.
        products: of the layer.
        bias: whether it has one.
        tensor: ranks that share it.
        parallel: what they share, outputs or inputs.
        device: of the layer.
    """
    site = Site(device, torch.float32, tensor=tensor, given_kernels=KERNELS)
    inputs, outputs = features
    if parallel == "columns":
        outputs *= tensor.size
    elif parallel == "rows":
        inputs *= tensor.size
    layer = Linear(inputs, outputs, site, bias=bias, parallel=parallel)
    layer.products = products
    generator = torch.Generator().manual_seed(2)
    for parameter in layer.parameters():
        drawn = torch.empty_like(parameter, device=CPU).normal_(generator=generator)
        parameter.data.copy_(drawn)
    Bucket(entries(layer.named_parameters()), KERNELS)
    return layer


def forward_backward(layer: Linear, microbatch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the output and the gradient of the input, of an input and the output's gradient."""
    x, grad = microbatch
    y = layer(x)
    y.backward(grad)
    assert x.grad is not None
    return y.detach(), x.grad
