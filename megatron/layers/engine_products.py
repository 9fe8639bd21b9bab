"""Linear layers in 8 bits whose factors and products come from Transformer Engine.

The first product, for the output, reads rows of the input and of the weight. The second, for the
input's gradient, reads rows of the gradient and columns of the weight. The third, for the weight's
gradient, reads columns of the gradient and of the input. If blocks have their own scales, blocks
along rows differ from blocks along columns. Rows and columns are then both rounded from the
unrounded tensor, and columns cannot be made from rows later. So a factor for W is kept by columns.

Ranks that share tokens keep their own tokens unrounded, and later gather and round them again. The
same numbers give the same bits. A weight is rounded when an iteration first needs it. A norm is
rounded while it is computed, if Transformer Engine has a kernel for both and ranks do not share
tokens.

Shapes: ``...`` any leading dimensions, n their product, i input features, o output features.
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
from megatron.layers.eight_bits import Format, types_of
from megatron.layers.products import FormsNorm, Kept, Normed, Then, rows
from megatron.layers.scales import GRADIENT, INPUT, WEIGHT, Role, Scaling
from megatron.parallel.lanes import Done, Pending
from megatron.parallel.tensor import TensorParallel


@dataclass(frozen=True)
class Rounded:
    """A factor [n, k] in 8 bits.

    Attributes:
        leading: the leading dimensions; n is their product.
        bits: the matrix by rows, by columns or both.
    """

    leading: torch.Size
    bits: Bits


class EngineProducts:
    """See ``Products``: Transformer Engine forms all three products in 8 bits.

    Args:
        engine: Transformer Engine.
        dtype: of activations.
        form: 8-bit types of the factors.
        recipe: ``tensorwise``, ``blockwise`` or ``mxfp8``; without ``scaling`` it decides how
            Transformer Engine finds scales.
        device: of the layer.
        scaling: gives one scale for each tensor (delayed scaling); ``None``: see ``recipe``.
        keeps_input: keep the input unrounded, because it is in memory anyway or is computed again.
    """

    accumulates = True
    are_autograds = False

    def __init__(
        self,
        engine: TransformerEngine,
        dtype: torch.dtype,
        form: Format,
        recipe: str,
        device: torch.device,
        scaling: Scaling | None = None,
        *,
        keeps_input: bool = False,
    ) -> None:
        self._engine = engine
        self._dtype, self._input_type = dtype, types_of(form)[INPUT]
        self._recipe, self._scaling = recipe, scaling
        if scaling is None:
            self._quantiser = _by_own_scales(engine, form, recipe, device)
        else:
            self._quantiser = _by_known_scales(engine, form, scaling)
        self._has_blocks = recipe in ("blockwise", "mxfp8")
        self._keeps_input = keeps_input
        self._again: dict[Role, Callable[[Kept], Bits]] = {}
        self._weight: Bits | None = None

    def begin(self) -> None:
        """Forget the weight in 8 bits, because the weight may have changed."""
        self._weight = None

    def of_input(self, x: Tensor, ranks: TensorParallel) -> tuple[Rounded, Kept]:
        """See ``Products``."""
        if self._keeps_input or ranks.sequence_parts > 1:
            return self.quantise(INPUT, ranks.gather(x)), (x,)
        return self._with_columns(INPUT, x)

    def of_norm(self, x: Tensor, ranks: TensorParallel) -> FormsNorm[Rounded] | None:
        """See ``Products``."""
        x_nk = rows(x)
        is_alone = not self._keeps_input and ranks.sequence_parts == 1 and x.dtype == self._dtype
        if not is_alone or not self._engine.rounds_norms(self._recipe, *x_nk.shape):
            return None
        if self._scaling is None:
            return partial(self._normed, self._quantiser(INPUT, x_nk))
        known = self._scaling.known(INPUT)
        if known is None:
            return None
        quantiser = self._engine.given_scale(self._input_type, known.scale, known.seen)
        return partial(self._normed, quantiser)

    def of_gradient(self, grad: Tensor, ranks: TensorParallel) -> tuple[Rounded, Kept]:
        """See ``Products``."""
        factor, kept = self._with_columns(GRADIENT, ranks.gather(grad))
        return factor, (grad,) if ranks.sequence_parts > 1 else kept

    def start_input_again(self, kept: Kept, ranks: TensorParallel) -> Pending[Rounded]:
        """See ``Products``."""
        if self._keeps_input or ranks.sequence_parts > 1:
            return Then(ranks.start_gather(kept[0]), partial(self._columns, INPUT))
        return Done(self._of_columns(INPUT, kept))

    def input_again(self, kept: Kept, ranks: TensorParallel) -> Rounded:
        """See ``Products``."""
        if self._keeps_input or ranks.sequence_parts > 1:
            return self._columns(INPUT, ranks.gather(kept[0]))
        return self._of_columns(INPUT, kept)

    def gradient_again(self, kept: Kept, ranks: TensorParallel) -> Rounded:
        """See ``Products``."""
        if ranks.sequence_parts > 1:
            return self._columns(GRADIENT, ranks.gather(kept[0]))
        return self._of_columns(GRADIENT, kept)

    def output(self, x: Rounded, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See ``Products``."""
        own = self._own_weight(weight)
        y_no = self._engine.product(own, x.bits, "TN", self._dtype, bias=bias, quick=True)
        return y_no.view(*x.leading, -1)

    def input_gradient(self, grad: Rounded, weight: Tensor) -> Tensor:
        """See ``Products``."""
        own = self._own_weight(weight)
        x_grad_ni = self._engine.product(own, grad.bits, "NN", self._dtype)
        return x_grad_ni.view(*grad.leading, -1)

    def weight_gradient(self, grad: Rounded, x: Rounded) -> Tensor:
        """See ``Products``."""
        return self._engine.product(x.bits, grad.bits, "NT", self._dtype)

    def accumulate_(self, total: Tensor, grad: Rounded, x: Rounded, *, begins: bool) -> None:
        """See ``Products``; the product adds to ``total`` itself."""
        self._engine.product(x.bits, grad.bits, "NT", total.dtype, out=total, adds=not begins)

    def quantise(
        self, role: Role, x: Tensor, *, straight: bool = True, turned: bool = False
    ) -> Rounded:
        """Return a tensor [..., k] in 8 bits."""
        x_nk = rows(x).contiguous()
        bits = rounded(self._quantiser(role, x_nk), x_nk, rows=straight, columns=turned)
        return Rounded(x.shape[:-1], bits)

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
        kept, self._again[INPUT] = columns_of(bits)
        return Normed(Rounded(x.shape[:-1], bits), kept, mean_n, inverse_n)

    def _with_columns(self, role: Role, x: Tensor) -> tuple[Rounded, Kept]:
        """Return a factor by rows and columns, and its columns, which are to be kept."""
        factor = self.quantise(role, x, turned=True)
        kept, self._again[role] = columns_of(factor.bits)
        return factor, kept

    def _of_columns(self, role: Role, kept: Kept) -> Rounded:
        """Return a factor for W from kept columns, by the function of the factor's role."""
        return Rounded(torch.Size(()), self._again[role](kept))

    def _columns(self, role: Role, x: Tensor) -> Rounded:
        """Return a factor for W by columns.

        If a tensor has one scale, Transformer Engine makes columns by turning rounded rows, so it
        must round the rows too.
        """
        return self.quantise(role, x, straight=not self._has_blocks, turned=True)

    def _own_weight(self, weight: Tensor) -> Bits:
        """Return the weight in 8 bits; it is rounded once after each call of ``begin``."""
        if self._weight is None:
            self._weight = self.quantise(WEIGHT, weight.detach(), turned=True).bits
        return self._weight


def _by_own_scales(
    engine: TransformerEngine, form: Format, recipe: str, device: torch.device
) -> Callable[[Role, Tensor], object]:
    """Return a function that gives a tensor's quantiser, which finds scales by ``recipe``."""
    made = {
        role: engine.quantiser(recipe, dtype, device, is_weight=role == WEIGHT)
        for role, dtype in types_of(form).items()
    }
    return lambda role, _: made[role]


def _by_known_scales(
    engine: TransformerEngine, form: Format, scaling: Scaling
) -> Callable[[Role, Tensor], object]:
    """Return a function that makes a tensor's quantiser, with the current scale of ``scaling``."""
    types = types_of(form)

    def quantiser(role: Role, x: Tensor) -> object:
        found = scaling.of(role, x, types[role])
        return engine.given_scale(types[role], found.scale, found.seen)

    return quantiser
