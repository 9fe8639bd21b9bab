"""Linear layers in 8 bits: input, weight and gradient of the output are scaled and rounded.

A layer has three products, for the output, the input's gradient and the weight's gradient. Tensor
cores multiply rows of one *factor* with rows of the other. The first product reads rows of the
input and of the weight; the second, rows of the gradient and columns of the weight; the third,
columns of the gradient and of the input. So the weight is kept in both layouts, and the factors of
the third product are kept *turned* (by columns), in 8 bits. A weight is quantised when an iteration
first needs it.

Ranks that share tokens gather them before quantising, so that all ranks use the same scale. Each
rank keeps its own tokens in 8 bits, and gathers them again later.

As in Transformer Engine, the sums of the first product may have fewer bits than fp32 on GPUs where
that is faster; gradients are summed in fp32.

Shapes: ``...`` any leading dimensions, n their product, i input features, o output features.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from megatron.kernels.eight_bits import E4M3, E5M2, EightBits
from megatron.kernels.face import Kernels
from megatron.layers.products import Kept, PlainProducts, Then, rows
from megatron.layers.scales import GRADIENT, INPUT, WEIGHT, Role, Scaling
from megatron.parallel.lanes import Done, Pending
from megatron.parallel.tensor import TensorParallel

Format = Literal["e4m3", "hybrid"]
"""The 8-bit types: ``e4m3`` for all factors, or ``hybrid`` with e5m2 for gradients."""


def types_of(form: Format) -> dict[Role, torch.dtype]:
    """Return the 8-bit type of each factor."""
    return {INPUT: E4M3, WEIGHT: E4M3, GRADIENT: E5M2 if form == "hybrid" else E4M3}


@dataclass(frozen=True)
class Quantised:
    """A factor [n, k] in 8 bits, in the layouts that are needed.

    Attributes:
        leading: the leading dimensions; n is their product.
        straight_nk: the matrix by rows: the numbers of a token, or of an output, are contiguous.
        turned_kn: the matrix by columns: the numbers of a feature are contiguous.
        worth: see ``EightBits``.
    """

    leading: torch.Size
    straight_nk: Tensor | None
    turned_kn: Tensor | None
    worth: Tensor

    @property
    def straight(self) -> EightBits:
        """The matrix by its rows."""
        assert self.straight_nk is not None, "it was kept for W alone"
        return EightBits(self.straight_nk, self.worth)

    @property
    def turned(self) -> EightBits:
        """The matrix by its columns."""
        if self.turned_kn is not None:
            return EightBits(self.turned_kn, self.worth)
        return EightBits(self.straight.bits_rk.T.contiguous(), self.worth)


class EightBitProducts:
    """See ``Products``: all three products are in 8 bits.

    Args:
        kernels: of the layer.
        dtype: of activations.
        form: 8-bit types of the factors.
        scaling: finds the scales.
        keeps_input: keep the input unquantised, because it is in memory anyway or is computed
            again; it is quantised a second time for the weight's gradient.
    """

    accumulates = True
    are_autograds = False

    def __init__(
        self,
        kernels: Kernels,
        dtype: torch.dtype,
        form: Format,
        scaling: Scaling,
        *,
        keeps_input: bool = False,
    ) -> None:
        self._kernels = kernels
        self._dtype = dtype
        self._types = types_of(form)
        self._scaling = scaling
        self._keeps_input = keeps_input
        self._weight: Quantised | None = None

    def begin(self) -> None:
        """Forget the quantised weight, which may have another value now."""
        self._weight = None

    def of_input(self, x: Tensor, ranks: TensorParallel) -> tuple[Quantised, Kept]:
        """See ``Products``."""
        turned = not self._keeps_input and ranks.sequence_parts == 1
        factor = self.quantise(INPUT, ranks.gather(x), turned=turned)
        return factor, (x,) if self._keeps_input else _kept(factor, ranks)

    def of_norm(self, x: Tensor, ranks: TensorParallel) -> None:
        """See ``Products``: always ``None``, because the kernels round after the norm's pass."""

    def of_gradient(self, grad: Tensor, ranks: TensorParallel) -> tuple[Quantised, Kept]:
        """See ``Products``."""
        turned = ranks.sequence_parts == 1
        factor = self.quantise(GRADIENT, ranks.gather(grad), turned=turned)
        return factor, _kept(factor, ranks)

    def start_input_again(self, kept: Kept, ranks: TensorParallel) -> Pending[Quantised]:
        """See ``Products``."""
        if self._keeps_input:
            return Then(ranks.start_gather(kept[0]), self._input_for_weight)
        if ranks.sequence_parts == 1:
            return Done(_of_turned(*kept))
        bits, worth = kept
        coming = ranks.start_gather(bits.view(torch.uint8))
        return Then(coming, lambda whole: _of_straight(whole.view(bits.dtype), worth))

    def input_again(self, kept: Kept, ranks: TensorParallel) -> Quantised:
        """See ``Products``."""
        if self._keeps_input:
            return self._input_for_weight(ranks.gather(kept[0]))
        return self.gradient_again(kept, ranks)

    def gradient_again(self, kept: Kept, ranks: TensorParallel) -> Quantised:
        """See ``Products``."""
        if ranks.sequence_parts == 1:
            return _of_turned(*kept)
        bits, worth = kept
        return _of_straight(ranks.gather(bits.view(torch.uint8)).view(bits.dtype), worth)

    def output(self, x: Quantised, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See ``Products``."""
        own = self._own_weight(weight).straight
        y_no = self._kernels.eight_bit_product(x.straight, own, self._dtype, bias, quick=True)
        return y_no.view(*x.leading, -1)

    def input_gradient(self, grad: Quantised, weight: Tensor) -> Tensor:
        """See ``Products``."""
        own = self._own_weight(weight).turned
        x_grad_ni = self._kernels.eight_bit_product(grad.straight, own, self._dtype)
        return x_grad_ni.view(*grad.leading, -1)

    def weight_gradient(self, grad: Quantised, x: Quantised) -> Tensor:
        """See ``Products``."""
        return self._kernels.eight_bit_product(grad.turned, x.turned, self._dtype)

    def accumulate_(self, total: Tensor, grad: Quantised, x: Quantised, *, begins: bool) -> None:
        """See ``Products``."""
        self._kernels.accumulate_eight_bit_product_(
            total, grad.turned, x.turned, self._dtype, begins=begins
        )

    def quantise(
        self, role: Role, x: Tensor, *, straight: bool = True, turned: bool = False
    ) -> Quantised:
        """Return a tensor [..., k] in 8 bits."""
        x_nk, dtype = rows(x), self._types[role]
        found = self._scaling.of(role, x_nk, dtype)
        bits = self._kernels.quantise(
            x_nk, found.scale, dtype, straight=straight, turned=turned, seen=found.seen
        )
        return Quantised(x.shape[:-1], *bits, found.worth)

    def _own_weight(self, weight: Tensor) -> Quantised:
        """Return the weight in 8 bits; it is quantised once after each call of ``begin``."""
        if self._weight is None:
            self._weight = self.quantise(WEIGHT, weight.detach(), turned=True)
        return self._weight

    def _input_for_weight(self, x: Tensor) -> Quantised:
        return self.quantise(INPUT, x, straight=False, turned=True)


class NarrowProducts(Protocol):
    """Forms two of a layer's three products from factors in 8 bits; see ``Products``."""

    def quantise(self, role: Role, x: Tensor) -> Any:
        """Return a tensor [..., k] in 8 bits."""
        ...

    def output(self, x: Any, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See ``Products``."""
        ...

    def input_gradient(self, grad: Any, weight: Tensor) -> Tensor:
        """See ``Products``."""
        ...


@dataclass(frozen=True)
class Both:
    """A factor in 8 bits, if a product needs 8 bits, and in the activations' dtype."""

    narrow: Any
    wide: Tensor


class WideWeightGradients:
    """See ``Products``: the weight's gradient is in the activations' dtype, the rest in 8 bits.

    Args:
        narrow: forms the output and the input's gradient.
        plain: forms the weight's gradient.
    """

    are_autograds = False

    def __init__(self, narrow: NarrowProducts, plain: PlainProducts) -> None:
        self._narrow, self._plain = narrow, plain
        self.accumulates = plain.accumulates

    def of_input(self, x: Tensor, ranks: TensorParallel) -> tuple[Both, Kept]:
        """See ``Products``."""
        whole, kept = self._plain.of_input(x, ranks)
        return Both(self._narrow.quantise(INPUT, whole), whole), kept

    def of_norm(self, x: Tensor, ranks: TensorParallel) -> None:
        """See ``Products``: always ``None``; the weight's gradient needs the unrounded norm."""

    def of_gradient(self, grad: Tensor, ranks: TensorParallel) -> tuple[Both, Kept]:
        """See ``Products``."""
        whole, kept = self._plain.of_gradient(grad, ranks)
        return Both(self._narrow.quantise(GRADIENT, whole), whole), kept

    def start_input_again(self, kept: Kept, ranks: TensorParallel) -> Pending[Both]:
        """See ``Products``."""
        return Then(self._plain.start_input_again(kept, ranks), lambda x: Both(None, x))

    def input_again(self, kept: Kept, ranks: TensorParallel) -> Both:
        """See ``Products``."""
        return Both(None, self._plain.input_again(kept, ranks))

    gradient_again = input_again

    def output(self, x: Both, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See ``Products``."""
        assert x.narrow is not None
        return self._narrow.output(x.narrow, weight, bias)

    def input_gradient(self, grad: Both, weight: Tensor) -> Tensor:
        """See ``Products``."""
        assert grad.narrow is not None
        return self._narrow.input_gradient(grad.narrow, weight)

    def weight_gradient(self, grad: Both, x: Both) -> Tensor:
        """See ``Products``."""
        return self._plain.weight_gradient(grad.wide, x.wide)

    def accumulate_(self, total: Tensor, grad: Both, x: Both, *, begins: bool) -> None:
        """See ``Products``."""
        self._plain.accumulate_(total, grad.wide, x.wide, begins=begins)


def _kept(factor: Quantised, ranks: TensorParallel) -> Kept:
    """Return the tensors to keep for the weight's gradient, of this rank's tokens."""
    if ranks.sequence_parts == 1:
        return factor.turned.bits_rk, factor.worth
    whole = factor.straight.bits_rk.view(*factor.leading, -1)
    return ranks.own_tokens(whole).contiguous(), factor.worth


def _of_turned(bits_kn: Tensor, worth: Tensor) -> Quantised:
    return Quantised(bits_kn.shape[1:], None, bits_kn, worth)


def _of_straight(bits: Tensor, worth: Tensor) -> Quantised:
    return Quantised(bits.shape[:-1], rows(bits), None, worth)
