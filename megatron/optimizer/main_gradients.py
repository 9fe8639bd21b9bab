"""Gradients summed over microbatches in full precision, without a second copy if one is enough.

Every parameter gets a ``main_grad``: the buffer that the passes add to and the optimizer reads.
Under bf16 it is fp32, and a hook adds autograd's ``.grad`` to it at once, so that at most one
layer's bf16 gradient is alive. In fp32 it *is* ``.grad``: autograd adds in place.

The buffers of a bucket lie side by side in one tensor, which a collective can reduce at once.
"""

from collections.abc import Sequence

import torch
from torch import nn

from megatron.kernels.face import Kernels
from megatron.layers.main_grad import give_main_grad, main_grad_of


class MainGradients:
    """Gives every parameter of a rank its zeroed ``main_grad`` and keeps it fed by autograd.

    Passes that form weight gradients themselves (T, IB, W) add to ``parameter.main_grad`` directly.

    Args:
        buckets: the parameters of every bucket, each once, and all of one type. fp32 and fp64
            parameters get a ``main_grad`` of their type, shared with ``.grad``, which must then
            never be set to ``None``.
        kernels: of the parameters' device and type.

    Attributes:
        buckets: the gradients of every bucket, one-dimensional.
    """

    def __init__(self, buckets: Sequence[Sequence[nn.Parameter]], kernels: Kernels) -> None:
        parameters = [parameter for bucket in buckets for parameter in bucket]
        assert len({id(p) for p in parameters}) == len(parameters), "a parameter is listed twice"
        self._kernels = kernels
        self.buckets = [self._make_bucket(bucket) for bucket in buckets]

    def zero(self) -> None:
        """Start a new sum: once per iteration, after the optimizer's step."""
        torch._foreach_zero_(self.buckets)

    def _make_bucket(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        first = parameters[0]
        full_precision = first.dtype in (torch.float32, torch.float64)
        bucket = torch.zeros(
            sum(parameter.numel() for parameter in parameters),
            dtype=first.dtype if full_precision else torch.float32,
            device=first.device,
        )
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, part in zip(parameters, bucket.split(sizes), strict=True):
            main_grad = part.view(parameter.shape)
            give_main_grad(parameter, main_grad)
            if full_precision:
                parameter.grad = main_grad
            else:
                parameter.register_post_accumulate_grad_hook(self._move_to_main_grad)
        return bucket

    def _move_to_main_grad(self, parameter: torch.Tensor) -> None:
        """Add the gradient that autograd has just left in ``.grad`` and free it."""
        if parameter.grad is None:  # W forms this weight's gradient, so autograd has none
            return
        self._kernels.accumulate_(main_grad_of(parameter), parameter.grad)
        parameter.grad = None
