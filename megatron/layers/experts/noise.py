"""Random numbers of a router, the same in every layout: seeded as dropout is.

Shapes: b batch, u tokens of a sequence that a rank has outside of attention and MLP, h hidden, e
experts.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.kernels.autograd import apply, once_differentiable
from megatron.layers.dropout import DropoutSeeds, own_noise
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.site import Site


def with_jitter(x_buh: Tensor, eps: float, forward_pass: ForwardPass, site: Site) -> Tensor:
    """Return a router's input times uniform noise between 1 - ``eps`` and 1 + ``eps``.

    As in arXiv 2101.03961, only training has noise.
    """
    seeds = forward_pass.seeds
    if not eps or seeds is None:
        return x_buh
    seeds.begin("router")

    def noise(*shape: int) -> Tensor:
        return x_buh.new_empty(shape).uniform_(1 - eps, 1 + eps)

    return x_buh * own_noise(x_buh, noise, site, seeds.part)


def replaced(logits_bue: Tensor, forward_pass: ForwardPass, site: Site) -> Tensor:
    """Return random logits, which spread tokens evenly, in the place of a router's own.

    Gradients go back as if the logits were the router's own, so that a benchmark does all the work
    of a training.
    """
    seeds = forward_pass.seeds or DropoutSeeds(0, 0, 0, forward_pass.layer)
    seeds.begin("balance")

    def noise(*shape: int) -> Tensor:
        return logits_bue.new_empty(shape).normal_()

    noise_bue = own_noise(logits_bue, noise, site, forward_pass.part)
    result: Tensor = apply(_Replaced, logits_bue, noise_bue)
    return result


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_bue: Tensor, noise_bue: Tensor) -> Tensor:
        return noise_bue.view_as(noise_bue)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_bue: Tensor) -> tuple[Tensor, None]:
        return grad_bue, None
