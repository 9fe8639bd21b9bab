"""Products of a linear layer in 8 bits by the kernels: a tensor has one scale.

So rounded tokens can be gathered and turned. Ranks that share tokens keep them in 8 bits.

Shapes: ``...`` any leading dimensions, n their product, i input features, o output features, k one
of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kernels.eight_bits import EightBits
from megatron.kernels.face import Kernels
from megatron.layers.eight_bit_settings import Format, types_of
from megatron.layers.eight_bits import Ends, Layouts, Multiplier
from megatron.layers.products import Kept, rows
from megatron.layers.scales import Role, Scaling
from megatron.parallel.tensor import TensorParallel


@dataclass(frozen=True)
class Quantised:
    """A factor [n, k] of the kernels, in the layouts that are needed.

    Attributes:
        leading: the leading dimensions; n is their product.
        straight_bits: the matrix by rows: the numbers of a token, or of an output, are contiguous.
        turned_bits: the matrix by columns: the numbers of a feature are contiguous; of experts'
            slots see ``places`` in ``kernels/eight_bits.py``.
        worth: see ``EightBits``.
        ends_e: ends of the experts' slots; also ``None`` if the factor is a weight.
    """

    leading: torch.Size
    straight_bits: Tensor | None
    turned_bits: Tensor | None
    worth: Tensor
    ends_e: Ends = None

    @property
    def straight(self) -> EightBits:
        """The matrix by its rows."""
        assert self.straight_bits is not None, "it was kept for W alone"
        return EightBits(self.straight_bits, self.worth)

    @property
    def turned(self) -> EightBits:
        """The matrix by its columns."""
        if self.turned_bits is not None:
            return EightBits(self.turned_bits, self.worth)
        assert self.ends_e is None, "it was not kept for W"
        return EightBits(self.straight.bits.T.contiguous(), self.worth)

    @property
    def ends(self) -> Tensor:
        """The ends of the experts' slots."""
        assert self.ends_e is not None
        return self.ends_e


class KernelMultiplier(Multiplier[Quantised]):
    """See ``Multiplier``.

    Args:
        kernels: of the layer.
        dtype: of activations.
        form: 8-bit types of the factors.
        scaling: finds the scales.
    """

    def __init__(
        self, kernels: Kernels, dtype: torch.dtype, form: Format, scaling: Scaling
    ) -> None:
        self._kernels, self._dtype = kernels, dtype
        self._types, self._scaling = types_of(form), scaling

    def factor(self, role: Role, x: Tensor, layouts: Layouts, ends_e: Ends = None) -> Quantised:
        """See ``Multiplier``."""
        x_nk, dtype = rows(x), self._types[role]
        found = self._scaling.of(role, x_nk, dtype)
        bits = self._kernels.quantise(
            x_nk,
            found.scale,
            dtype,
            straight=layouts != "columns",
            turned=layouts != "rows",
            seen=found.seen,
        )
        return Quantised(x.shape[:-1], *bits, found.worth)

    def gathered_weight(self, bits_rk: Tensor, worth_gbc: Tensor) -> Quantised:
        """See ``Multiplier``."""
        turned_kr = bits_rk.T.contiguous()
        return Quantised(bits_rk.shape[:1], bits_rk, turned_kr, worth_gbc.view(()))

    def tensors(self, weight: Quantised) -> Sequence[Tensor]:
        """See ``Multiplier``."""
        return weight.straight.bits, weight.turned.bits, weight.worth

    def kept(self, role: Role, factor: Quantised) -> Kept:
        """See ``Multiplier``."""
        return factor.turned.bits, factor.worth

    def again(self, role: Role, kept: Kept, ends_e: Ends = None) -> Quantised:
        """See ``Multiplier``."""
        turned, worth = kept
        return Quantised(turned.shape[1:], None, turned, worth, ends_e)

    def shared(
        self, role: Role, x: Tensor, whole: Tensor, ranks: TensorParallel
    ) -> tuple[Quantised, Kept]:
        """See ``Multiplier``."""
        factor = self.factor(role, whole, "rows")
        own = ranks.own_tokens(factor.straight.bits.view(*factor.leading, -1))
        return factor, (own.contiguous(), factor.worth)

    def gathered(self, role: Role, kept: Kept) -> tuple[Tensor, Callable[[Tensor], Quantised]]:
        """See ``Multiplier``."""
        own, worth = kept

        def whole_factor(whole: Tensor) -> Quantised:
            bits = whole.view(own.dtype)
            return Quantised(bits.shape[:-1], rows(bits), None, worth)

        return own.view(torch.uint8), whole_factor

    def output(self, x: Quantised, weight: Quantised, bias: Tensor | None) -> Tensor:
        """See ``Multiplier``."""
        y_no = self._kernels.eight_bit_product(
            x.straight, weight.straight, self._dtype, bias, quick=True
        )
        return y_no.view(*x.leading, -1)

    def input_gradient(self, grad: Quantised, weight: Quantised) -> Tensor:
        """See ``Multiplier``."""
        x_grad_ni = self._kernels.eight_bit_product(grad.straight, weight.turned, self._dtype)
        return x_grad_ni.view(*grad.leading, -1)

    def weight_gradient(self, grad: Quantised, x: Quantised) -> Tensor:
        """See ``Multiplier``."""
        return self._kernels.eight_bit_product(grad.turned, x.turned, self._dtype)

    def accumulate_(self, total: Tensor, grad: Quantised, x: Quantised, *, begins: bool) -> None:
        """See ``Multiplier``."""
        self._kernels.accumulate_eight_bit_product_(
            total, grad.turned, x.turned, self._dtype, begins=begins
        )
