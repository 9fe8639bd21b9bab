"""A toy part in the place of an MLP: some matrices, mixed by a softmax, with products of its own.

It is what a layer of experts asks of its surroundings: a matrix [E, h, h] that no ``Linear`` holds,
whose gradient may wait for W, and a loss of its own.

Shapes: b batch, u tokens of a sequence, n = b u, E matrices, h inputs, o outputs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.kernels.autograd import apply
from megatron.layers.forward_pass import PLAIN_PASS, ForwardPass
from megatron.layers.main_grad import main_grad_of
from megatron.layers.site import Site
from megatron.layers.weight_gradients import Defer


class Mixture(nn.Module):
    """Every token is multiplied by all matrices; a softmax of the token mixes the results.

    The loss that the part leaves has a coefficient; with 0 there is no loss.
    """

    defer: Defer | None = None

    def __init__(self, size: int, site: Site, *, coefficient: float = 0.0) -> None:
        super().__init__()
        self._coefficient = coefficient
        device, dtype, matrices = site.device, site.dtype, 3
        weight_Eoh = torch.empty(matrices, size, size, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight_Eoh)
        self.router = nn.Linear(size, matrices, bias=False, device=device, dtype=dtype)

    @property
    def losses_left(self) -> Sequence[str]:
        return ["mixture_loss"] if self._coefficient else []

    @property
    def leaves_load(self) -> bool:
        return False

    @property
    def deferred(self) -> Sequence[Tensor]:
        return (self.weight,)

    def forward(self, x_buh: Tensor, forward_pass: ForwardPass = PLAIN_PASS) -> Tensor:
        shares_buE = self.router(x_buh).softmax(-1)
        if self._coefficient:
            loss = shares_buE.square().sum(-1).mean()
            forward_pass.leave_loss("mixture_loss", loss, self._coefficient)
        made_buEo = apply(_Products, x_buh, self.weight, self.defer)
        mixed_buo: Tensor = (shares_buE[..., None] * made_buEo).sum(-2)
        return mixed_buo


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_buh: Tensor, weight_Eoh: Tensor, defer: Defer | None) -> Tensor:
        ctx.save_for_backward(x_buh)
        ctx.weight, ctx.defer = weight_Eoh, defer
        return torch.einsum("buh,eoh->bueo", x_buh, weight_Eoh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_buEo: Tensor) -> tuple[Tensor | None, ...]:
        (x_buh,), weight_Eoh = ctx.saved_tensors, ctx.weight

        def product() -> Tensor:
            return torch.einsum("bueo,buh->eoh", grad_buEo, x_buh)

        x_grad_buh = torch.einsum("bueo,eoh->buh", grad_buEo, weight_Eoh)
        if ctx.defer is None:
            return x_grad_buh, product(), None

        def work() -> None:
            main_grad_of(weight_Eoh).add_(product())

        ctx.defer(work)
        return x_grad_buh, None, None
