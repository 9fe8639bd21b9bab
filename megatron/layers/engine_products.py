"""Linear layers in 8 bits whose factors and products are Transformer Engine's.

The first product wants rows of inputs and of the weight; the second, rows of gradients and columns
of the weight; the third, columns of both. Where blocks have scales, a block of a row is none of a
column: both are rounded from the tensor itself, and columns cannot be had from rows later. So a
factor that only W needs is kept by its columns. Ranks that share tokens keep those of their own as
they are, in place of a part of the columns, and gather and round them again: the same numbers give
the same bits. A weight is rounded when an iteration first needs it. A norm is rounded as it is
formed, where the package has a pass for both and ranks do not share tokens.

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
        leading: the leading dimensions that n is the product of.
        bits: by rows, by columns or by both.
    """

    leading: torch.Size
    bits: Bits


class EngineProducts:
    """See ``Products``: all three products are Transformer Engine's, in 8 bits.

    Args:
        engine: the package.
        dtype: of activations.
        form: types of the factors.
        recipe: ``tensorwise``, ``blockwise`` or ``mxfp8``, if no scales are known beforehand.
        device: of the layer.
        scaling: knows scales beforehand, one for a tensor.
        keeps_input: the input is kept as it is, because it is there anyway or is made again.
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
        """Forget the weight in 8 bits, which may have another value now."""
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
        """See ``Products``: the sum is formed in the product."""
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
        """Return a factor by rows and columns, and what to keep of it: its columns."""
        factor = self.quantise(role, x, turned=True)
        kept, self._again[role] = columns_of(factor.bits)
        return factor, kept

    def _of_columns(self, role: Role, kept: Kept) -> Rounded:
        """Return a factor of kept columns, for W: all factors of a role are made alike."""
        return Rounded(torch.Size(()), self._again[role](kept))

    def _columns(self, role: Role, x: Tensor) -> Rounded:
        """Return a factor for W.

        Where a tensor has one scale, columns are rows turned, and the package rounds rows first.
        """
        return self.quantise(role, x, straight=not self._has_blocks, turned=True)

    def _own_weight(self, weight: Tensor) -> Bits:
        """Return the weight in 8 bits, which is made once between two calls of ``begin``."""
        if self._weight is None:
            self._weight = self.quantise(WEIGHT, weight.detach(), turned=True).bits
        return self._weight


def _by_own_scales(
    engine: TransformerEngine, form: Format, recipe: str, device: torch.device
) -> Callable[[Role, Tensor], object]:
    """Return what tells the quantiser of a tensor, by what it is to its layer."""
    made = {
        role: engine.quantiser(recipe, dtype, device, is_weight=role == WEIGHT)
        for role, dtype in types_of(form).items()
    }
    return lambda role, _: made[role]


def _by_known_scales(
    engine: TransformerEngine, form: Format, scaling: Scaling
) -> Callable[[Role, Tensor], object]:
    """Return what tells the quantiser of a tensor, with the scale that it has now."""
    types = types_of(form)

    def quantiser(role: Role, x: Tensor) -> object:
        found = scaling.of(role, x, types[role])
        return engine.given_scale(types[role], found.scale, found.seen)

    return quantiser
