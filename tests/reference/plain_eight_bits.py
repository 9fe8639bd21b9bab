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

    def seen_by_powers_of_two(self, x: torch.Tensor) -> torch.Tensor:
        """As ``seen``, for every row by itself, with the next smaller powers of two for scales."""
        known = x.abs().amax(-1, keepdim=True).float()
        ratios = torch.tensor(self.most) / known.where(known > 0, 1.0)
        scales = torch.exp2(torch.frexp(ratios).exponent.double() - 1)
        return self.rounded(x.double() * scales) / scales


E4M3 = Kind(mantissa=3, least=-6, most=448.0)
E5M2 = Kind(mantissa=2, least=-14, most=57344.0)
GRADIENTS = {"e4m3": E4M3, "hybrid": E5M2}


BLOCKS = {"blockwise": 128, "mxfp8": 32}


@dataclass(frozen=True)
class Rounding:
    """How a recipe rounds a matrix for a product.

    Attributes:
        recipe: one scale for a tensor, or one for a block of a row or a column.
        gradients: types of gradients.
    """

    recipe: str
    gradients: Kind

    def rows(self, kind: Kind, x: torch.Tensor, *, square: bool = False) -> torch.Tensor:
        """What a product that adds up along rows makes of a matrix; float64.

        Args:
            kind: type of 8 bits.
            x: a matrix.
            square: with ``blockwise`` blocks are squares, as those of weights are.
        """
        if self.recipe not in BLOCKS:
            return kind.seen(x)
        width = BLOCKS[self.recipe]
        height = width if square and self.recipe == "blockwise" else 1
        up, across = (-(-size // b) for size, b in zip(x.shape, (height, width), strict=True))
        whole = torch.zeros(up * height, across * width, dtype=torch.float64)
        whole[: x.shape[0], : x.shape[1]] = x
        blocks = whole.view(up, height, across, width).transpose(1, 2)
        seen = kind.seen_by_powers_of_two(blocks.flatten(2)).view_as(blocks).transpose(1, 2)
        return seen.reshape(whole.shape)[: x.shape[0], : x.shape[1]]

    def columns(self, kind: Kind, x: torch.Tensor, *, square: bool = False) -> torch.Tensor:
        """What a product that adds up along columns makes of a matrix; see ``rows``."""
        return self.rows(kind, x.T, square=square).T


class Linear(torch.autograd.Function):
    """``x @ weight.T``, with all three products in 8 bits."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, rounding: Rounding
    ) -> torch.Tensor:
        """Each tensor is scaled by itself."""
        x_ni, ctx.shape, ctx.types = x.flatten(0, -2), x.shape, (x.dtype, weight.dtype)
        ctx.rounding = rounding
        ctx.x, ctx.weight = (
            rounding.columns(E4M3, x_ni),
            rounding.columns(E4M3, weight, square=True),
        )
        product = rounding.rows(E4M3, x_ni) @ rounding.rows(E4M3, weight, square=True).T
        return product.view(*x.shape[:-1], -1).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Of blocks, both products take a gradient of their own."""
        grad_no, rounding = grad.flatten(0, -2), ctx.rounding
        weight_grad = rounding.columns(rounding.gradients, grad_no).T @ ctx.x
        x_grad = rounding.rows(rounding.gradients, grad_no) @ ctx.weight
        return x_grad.view(ctx.shape).to(ctx.types[0]), weight_grad.to(ctx.types[1]), None


def linear_of(
    form: str, recipe: str = "tensorwise"
) -> Callable[[dict[str, torch.Tensor], str, torch.Tensor], torch.Tensor]:
    """Return what may stand for the plain GPT's own linear layer."""
    rounding = Rounding(recipe, GRADIENTS[form])

    def linear(parameters: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
        product = apply(Linear, x, parameters[f"{name}.weight"], rounding)
        bias = parameters.get(f"{name}.bias")
        return product if bias is None else product + bias

    return linear
