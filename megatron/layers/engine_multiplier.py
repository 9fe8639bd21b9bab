"""Products of a linear layer in 8 bits by Transformer Engine.

If blocks have their own scales, blocks along rows differ from blocks along columns. Rows and
columns are then both rounded from the unrounded tensor, and columns cannot be made from rows later.
So a factor for W is kept by columns, and ranks that share tokens keep their own tokens unrounded. A
norm is rounded while it is computed, if Transformer Engine has a kernel for both.

Shapes: ``...`` any leading dimensions, n their product, k features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron.kernels.cuda.transformer_engine import (
    Bits,
    TransformerEngine,
    columns_of,
    rounded,
)
from megatron.layers.eight_bit_settings import BLOCKS, Format, Recipe, types_of
from megatron.layers.eight_bits import Ends, Layouts, Multiplier
from megatron.layers.products import FormsNorm, Kept, Normed, rows
from megatron.layers.scales import INPUT, WEIGHT, Role, Scaling


@dataclass(frozen=True)
class Rounded:
    """A factor [n, k] in 8 bits.

    Attributes:
        leading: the leading dimensions; n is their product.
        bits: the matrix by rows, by columns or both.
    """

    leading: torch.Size
    bits: Bits


class EngineMultiplier(Multiplier[Rounded]):
    """See ``Multiplier``.

    Args:
        engine: Transformer Engine.
        dtype: of activations.
        form: 8-bit types of the factors.
        recipe: ``tensorwise``, ``blockwise`` or ``mxfp8``; without ``scaling`` it decides how
            Transformer Engine finds scales.
        device: of the layer.
        scaling: gives one scale for each tensor (delayed scaling); ``None``: see ``recipe``.
    """

    def __init__(
        self,
        engine: TransformerEngine,
        dtype: torch.dtype,
        form: Format,
        recipe: Recipe,
        device: torch.device,
        scaling: Scaling | None = None,
    ) -> None:
        self._engine, self._dtype, self._types = engine, dtype, types_of(form)
        self._recipe, self._scaling = recipe, scaling
        self._by_recipe = {
            role: engine.quantiser(recipe, kind, device, is_weight=role == WEIGHT)
            for role, kind in self._types.items()
            if scaling is None
        }
        self._of_columns: dict[Role, Callable[[Kept], Bits]] = {}

    def factor(self, role: Role, x: Tensor, layouts: Layouts, ends_e: Ends = None) -> Rounded:
        """See ``Multiplier``."""
        x_nk = rows(x).contiguous()
        # With one scale for a tensor, Transformer Engine turns rounded rows into columns.
        has_rows = layouts != "columns" or self._recipe not in BLOCKS
        quantiser = self._quantiser(role, x_nk)
        bits = rounded(quantiser, x_nk, rows=has_rows, columns=layouts != "rows")
        return Rounded(x.shape[:-1], bits)

    def gathered_weight(self, bits_rk: Tensor, worth_gbc: Tensor) -> Rounded:
        """Raise an error: the kernels multiply by weights that were gathered in 8 bits."""
        raise AssertionError("Transformer Engine has its own tensors of 8 bits")

    def norm(self, x: Tensor) -> FormsNorm[Rounded] | None:
        """See ``Multiplier``."""
        x_nk = rows(x)
        if x.dtype != self._dtype or not self._engine.rounds_norms(self._recipe, *x_nk.shape):
            return None
        if self._scaling is not None and self._scaling.known(INPUT) is None:
            return None
        return partial(self._normed, self._quantiser(INPUT, x_nk))

    def kept(self, role: Role, factor: Rounded) -> Kept:
        """See ``Multiplier``."""
        # All factors of a role are described alike, so the last description fits every one.
        kept, self._of_columns[role] = columns_of(factor.bits)
        return kept

    def again(self, role: Role, kept: Kept, ends_e: Ends = None) -> Rounded:
        """See ``Multiplier``."""
        return Rounded(torch.Size(()), self._of_columns[role](kept))

    def output(self, x: Rounded, weight: Rounded, bias: Tensor | None) -> Tensor:
        """See ``Multiplier``."""
        y_no = self._engine.product(weight.bits, x.bits, "TN", self._dtype, bias=bias, quick=True)
        return y_no.view(*x.leading, -1)

    def input_gradient(self, grad: Rounded, weight: Rounded) -> Tensor:
        """See ``Multiplier``."""
        x_grad_ni = self._engine.product(weight.bits, grad.bits, "NN", self._dtype)
        return x_grad_ni.view(*grad.leading, -1)

    def weight_gradient(self, grad: Rounded, x: Rounded) -> Tensor:
        """See ``Multiplier``."""
        return self._engine.product(x.bits, grad.bits, "NT", self._dtype)

    def accumulate_(self, total: Tensor, grad: Rounded, x: Rounded, *, begins: bool) -> None:
        """See ``Multiplier``; the product adds to ``total`` itself."""
        self._engine.product(x.bits, grad.bits, "NT", total.dtype, out=total, adds=not begins)

    def _quantiser(self, role: Role, x_nk: Tensor) -> object:
        """Return the quantiser of a tensor; with ``scaling`` it has the tensor's scale."""
        if self._scaling is None:
            return self._by_recipe[role]
        found = self._scaling.of(role, x_nk, self._types[role])
        return self._engine.given_scale(self._types[role], found.scale, found.seen)

    def _normed(
        self,
        quantiser: object,
        x: Tensor,
        scale_h: Tensor,
        bias_h: Tensor | None,
        epsilon: float,
    ) -> Normed[Rounded]:
        """Return the norm of an input in 8 bits; see ``FormsNorm``."""
        bits, mean_n, inverse_n = self._engine.norm(
            rows(x).contiguous(), scale_h, bias_h, epsilon, quantiser
        )
        factor = Rounded(x.shape[:-1], bits)
        return Normed(factor, self.kept(INPUT, factor), mean_n, inverse_n)
