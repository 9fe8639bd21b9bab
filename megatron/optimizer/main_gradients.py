"""Gradients summed over microbatches in full precision, without a second copy if one is enough.

Every parameter gets a ``main_grad``: the buffer that the passes add to and the optimizer reads.
Under bf16 it is fp32, and a hook adds autograd's ``.grad`` to it at once, so that at most one
layer's bf16 gradient is alive. In fp32 it *is* ``.grad``: autograd adds in place.
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
        parameters: the parameters, each once. fp32 and fp64 parameters get a ``main_grad`` of
            their dtype, shared with ``.grad``, which must then never be set to ``None``.
        kernels: of the parameters' device and type.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], kernels: Kernels) -> None:
        assert len({id(p) for p in parameters}) == len(parameters), "a parameter is listed twice"
        self._kernels = kernels
        self._main_grads = []
        for parameter in parameters:
            full_precision = parameter.dtype in (torch.float32, torch.float64)
            dtype = parameter.dtype if full_precision else torch.float32
            main_grad = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            give_main_grad(parameter, main_grad)
            if full_precision:
                parameter.grad = main_grad
            else:
                parameter.register_post_accumulate_grad_hook(self._move_to_main_grad)
            self._main_grads.append(main_grad)

    def zero(self) -> None:
        """Start a new sum: once per iteration, after the optimizer's step."""
        torch._foreach_zero_(self._main_grads)

    def _move_to_main_grad(self, parameter: torch.Tensor) -> None:
        """Add the gradient that autograd has just left in ``.grad`` and free it."""
        if parameter.grad is None:  # W forms this weight's gradient, so autograd has none
            return
        self._kernels.accumulate_(main_grad_of(parameter), parameter.grad)
        parameter.grad = None
