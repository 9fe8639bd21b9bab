"""Linear layers in 8 bits, by arithmetic alone: numbers are rounded in float64, by their exponents.

Nothing here knows PyTorch's types of 8 bits. Scales are fp32, as on every device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.kernels.autograd import apply


@dataclass(frozen=True)
class Kind:
    """A type of 8 bits.

    Attributes:
        mantissa: its bits.
        least: exponent of the smallest normal number.
        most: the largest number.
    """

    mantissa: int
    least: int
    most: float

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """The nearest number of this type, of two the even one; float64."""
        x = x.double().clamp(-self.most, self.most)
        exponent = torch.frexp(x).exponent - 1
        step = torch.exp2(exponent.clamp(min=self.least).double() - self.mantissa)
        nearest: torch.Tensor = torch.round(x / step)
        return nearest * step

    def seen(self, x: torch.Tensor, amax: float | None = None) -> torch.Tensor:
        """What a product makes of a tensor: scaled, rounded and scaled back; float64.

        Args:
            x: of any type.
            amax: the magnitude that becomes the largest number; ``None``: the tensor's own.
        """
        known = x.abs().amax() if amax is None else torch.tensor(amax)
        if not known:
            return x.double()
        scale = (torch.tensor(self.most) / known.float()).float()
        return self.rounded(x.float() * scale) / scale.double()


E4M3 = Kind(mantissa=3, least=-6, most=448.0)
E5M2 = Kind(mantissa=2, least=-14, most=57344.0)
GRADIENTS = {"e4m3": E4M3, "hybrid": E5M2}


class Linear(torch.autograd.Function):
    """``x @ weight.T``, with all three products in 8 bits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, gradient: Kind) -> torch.Tensor:
        """Each tensor is scaled by itself."""
        ctx.x, ctx.weight, ctx.kind = E4M3.seen(x), E4M3.seen(weight), gradient
        ctx.types = x.dtype, weight.dtype
        product: torch.Tensor = ctx.x @ ctx.weight.T
        return product.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Both products take the same gradient."""
        seen = ctx.kind.seen(grad)
        weight_grad = seen.flatten(0, -2).T @ ctx.x.flatten(0, -2)
        return (seen @ ctx.weight).to(ctx.types[0]), weight_grad.to(ctx.types[1]), None


def linear_of(form: str) -> Callable[[dict[str, torch.Tensor], str, torch.Tensor], torch.Tensor]:
    """Return what may stand for the plain GPT's own linear layer."""

    def linear(parameters: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
        product = apply(Linear, x, parameters[f"{name}.weight"], GRADIENTS[form])
        bias = parameters.get(f"{name}.bias")
        return product if bias is None else product + bias

    return linear
