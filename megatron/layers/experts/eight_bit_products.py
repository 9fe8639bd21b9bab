"""Experts in 8 bits: each one's slots, matrix and gradients are scaled and rounded by themselves.

An expert is rounded as a linear layer of its own (``layers/eight_bits.py``). An expert without
slots has no magnitude: it leaves the history of its scales as it is. For scales of blocks see
``layers/block_multiplier.py``.

Shapes: as in ``grouped_products.py``.
"""

import torch
from torch import Tensor

from megatron.kernels.face import Kernels
from megatron.layers.eight_bit_settings import Format
from megatron.layers.eight_bits import ByMultiplier, Ends, Layouts
from megatron.layers.kernel_multiplier import KernelMultiplier, Quantised
from megatron.layers.products import Factor, Kept
from megatron.layers.scales import INPUT, WEIGHT, Role, Scaling


class EightBitGroupedProducts(ByMultiplier[Factor]):
    """See ``GroupedProducts``: a layer of experts multiplies in 8 bits."""

    def factor(
        self, role: Role, rows_zk: Tensor, ends_e: Tensor, *, keeps: bool
    ) -> tuple[Factor, Kept]:
        """See ``GroupedProducts``."""
        multiplier = self._multiplier
        if keeps and role == INPUT and self._keeps_input:
            return multiplier.factor(role, rows_zk, "rows", ends_e), (rows_zk,)
        factor = multiplier.factor(role, rows_zk, "both" if keeps else "rows", ends_e)
        return factor, multiplier.kept(role, factor) if keeps else ()

    def again(self, role: Role, kept: Kept, ends_e: Tensor) -> Factor:
        """See ``GroupedProducts``."""
        if role == INPUT and self._keeps_input:
            return self.for_weight(role, kept[0], ends_e)
        return self._multiplier.again(role, kept, ends_e)

    def for_weight(self, role: Role, rows_zk: Tensor, ends_e: Tensor) -> Factor:
        """See ``GroupedProducts``."""
        return self._multiplier.factor(role, rows_zk, "columns", ends_e)


class GroupedMultiplier(KernelMultiplier):
    """See ``Multiplier``: the kernels form all products of a layer of experts.

    Args:
        kernels: of the layer.
        dtype: of activations.
        form: 8-bit types of the factors.
        scaling: finds the scales.
        matrices: the weight, [e, o, i]; its values are not read.
    """

    def __init__(
        self, kernels: Kernels, dtype: torch.dtype, form: Format, scaling: Scaling, matrices: Tensor
    ) -> None:
        super().__init__(kernels, dtype, form, scaling)
        experts, outputs, _ = matrices.shape
        self._ends_of_weights_e = torch.arange(
            1, experts + 1, dtype=torch.int32, device=matrices.device
        )
        self._ends_of_weights_e *= outputs

    def factor(self, role: Role, x: Tensor, layouts: Layouts, ends_e: Ends = None) -> Quantised:
        """See ``Multiplier``."""
        assert ends_e is not None
        dtype = self._types[role]
        found = self._scaling.of(role, x, dtype, ends_e)
        bits = self._kernels.quantise_groups(
            x,
            found.scale,
            ends_e,
            dtype,
            straight=layouts != "columns",
            turned=layouts != "rows",
            seen_g=found.seen,
        )
        return Quantised(x.shape[:1], *bits, found.worth, ends_e)

    def weight(self, weight: Tensor) -> Quantised:
        """Return the matrices [e, o, i] and [e, i, o] in 8 bits."""
        ends_e, dtype = self._ends_of_weights_e, self._types[WEIGHT]
        found = self._scaling.of(WEIGHT, weight.flatten(0, 1), dtype, ends_e)
        bits = self._kernels.quantise_matrices(
            weight, found.scale, ends_e, dtype, seen_g=found.seen
        )
        return Quantised(weight.shape[:1], *bits, found.worth)

    def gathered_weight(self, bits_rk: Tensor, worth_gbc: Tensor) -> Quantised:
        """See ``Multiplier``."""
        straight_eoi = bits_rk.unflatten(0, (len(worth_gbc), -1))
        turned_eio = straight_eoi.mT.contiguous()
        return Quantised(straight_eoi.shape[:1], straight_eoi, turned_eio, worth_gbc.view(-1))

    def output(self, x: Quantised, weight: Quantised, bias: Tensor | None) -> Tensor:
        """See ``Multiplier``; biases are added elsewhere."""
        assert bias is None
        return self._kernels.grouped_eight_bit_product(
            x.straight, weight.straight, x.ends, self._dtype, quick=True
        )

    def input_gradient(self, grad: Quantised, weight: Quantised) -> Tensor:
        """See ``Multiplier``."""
        return self._kernels.grouped_eight_bit_product(
            grad.straight, weight.turned, grad.ends, self._dtype
        )

    def weight_gradient(self, grad: Quantised, x: Quantised) -> Tensor:
        """See ``Multiplier``."""
        return self._kernels.grouped_eight_bit_weight_product(
            grad.turned, x.turned, x.ends, self._dtype
        )

    def accumulate_(self, total: Tensor, grad: Quantised, x: Quantised, *, begins: bool) -> None:
        """See ``Multiplier``."""
        self._kernels.accumulate_grouped_eight_bit_product_(
            total, grad.turned, x.turned, x.ends, begins=begins
        )
