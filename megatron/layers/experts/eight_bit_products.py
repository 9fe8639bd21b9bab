"""Experts in 8 bits: each one's slots, matrix and gradients are scaled and rounded by themselves.

An expert is rounded as a linear layer of its own (``layers/eight_bits.py``). An expert without
slots has no magnitude: it leaves the history of its scales as it is.

Shapes: as in ``grouped_products.py``.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from megatron.kernels.eight_bits import EightBitGroups
from megatron.kernels.face import Kernels
from megatron.layers.eight_bits import Format, types_of
from megatron.layers.experts.grouped_products import PlainGroupedProducts, Side
from megatron.layers.products import Kept
from megatron.layers.scales import GRADIENT, INPUT, WEIGHT, ExpertScaling, Role

_ROLES: Final[dict[Side, Role]] = {"input": INPUT, "gradient": GRADIENT}


@dataclass(frozen=True)
class QuantisedSlots:
    """Slots in 8 bits, in the layouts that are needed.

    Attributes:
        straight_zk: by rows: the numbers of a slot are contiguous.
        turned_kp: by columns; see ``places`` in ``kernels/eight_bits.py``.
        worth_e: see ``EightBitGroups``.
    """

    straight_zk: Tensor | None
    turned_kp: Tensor | None
    worth_e: Tensor

    @property
    def straight(self) -> EightBitGroups:
        """The slots by their rows."""
        assert self.straight_zk is not None, "it was kept for W alone"
        return EightBitGroups(self.straight_zk, self.worth_e)

    @property
    def turned(self) -> EightBitGroups:
        """The slots by their columns."""
        assert self.turned_kp is not None, "it was not kept for W"
        return EightBitGroups(self.turned_kp, self.worth_e)


class EightBitGroupedProducts:
    """See ``GroupedProducts``: all three products are in 8 bits.

    Args:
        kernels: of the layer.
        dtype: of activations.
        form: 8-bit types of the factors.
        scaling: finds the scales.
        experts: e.
        outputs: o of this rank.
        device: of the layer.
        keeps_input: keep the input unquantised, because it is computed again; it is quantised a
            second time for the weight's gradient.
    """

    def __init__(
        self,
        kernels: Kernels,
        dtype: torch.dtype,
        form: Format,
        scaling: ExpertScaling,
        experts: int,
        outputs: int,
        device: torch.device,
        *,
        keeps_input: bool = False,
    ) -> None:
        self._kernels, self._dtype = kernels, dtype
        self._types, self._scaling = types_of(form), scaling
        self._keeps_input = keeps_input
        self._ends_of_weights_e = torch.arange(1, experts + 1, dtype=torch.int32, device=device)
        self._ends_of_weights_e *= outputs
        self._weight: tuple[EightBitGroups, EightBitGroups] | None = None

    def begin(self) -> None:
        """Forget the quantised matrices, which may have other values now."""
        self._weight = None

    def factor(
        self, side: Side, rows_zk: Tensor, ends_e: Tensor, *, keeps: bool
    ) -> tuple[QuantisedSlots, Kept]:
        """See ``GroupedProducts``."""
        if keeps and side == "input" and self._keeps_input:
            return self.quantise(side, rows_zk, ends_e), (rows_zk,)
        found = self.quantise(side, rows_zk, ends_e, turned=keeps)
        return found, (found.turned.bits, found.worth_e) if keeps else ()

    def again(self, side: Side, kept: Kept, ends_e: Tensor) -> QuantisedSlots:
        """See ``GroupedProducts``."""
        if side == "input" and self._keeps_input:
            return self.for_weight(side, kept[0], ends_e)
        turned_kp, worth_e = kept
        return QuantisedSlots(None, turned_kp, worth_e)

    def for_weight(self, side: Side, rows_zk: Tensor, ends_e: Tensor) -> QuantisedSlots:
        """See ``GroupedProducts``."""
        return self.quantise(side, rows_zk, ends_e, straight=False, turned=True)

    def output(self, x: QuantisedSlots, weight_eoi: Tensor, ends_e: Tensor) -> Tensor:
        """See ``GroupedProducts``."""
        straight, _ = self._own_weight(weight_eoi)
        kernels = self._kernels
        return kernels.grouped_eight_bit_product(
            x.straight, straight, ends_e, self._dtype, quick=True
        )

    def input_gradient(self, grad: QuantisedSlots, weight_eoi: Tensor, ends_e: Tensor) -> Tensor:
        """See ``GroupedProducts``."""
        _, turned = self._own_weight(weight_eoi)
        return self._kernels.grouped_eight_bit_product(grad.straight, turned, ends_e, self._dtype)

    def weight_gradient(self, grad: QuantisedSlots, x: QuantisedSlots, ends_e: Tensor) -> Tensor:
        """See ``GroupedProducts``."""
        return self._kernels.grouped_eight_bit_weight_product(
            grad.turned, x.turned, ends_e, self._dtype
        )

    def accumulate_(
        self,
        total_eoi: Tensor,
        grad: QuantisedSlots,
        x: QuantisedSlots,
        ends_e: Tensor,
        *,
        begins: bool,
    ) -> None:
        """See ``GroupedProducts``."""
        self._kernels.accumulate_grouped_eight_bit_product_(
            total_eoi, grad.turned, x.turned, ends_e, begins=begins
        )

    def quantise(
        self,
        side: Side,
        rows_zk: Tensor,
        ends_e: Tensor,
        *,
        straight: bool = True,
        turned: bool = False,
    ) -> QuantisedSlots:
        """Return slots in 8 bits."""
        role = _ROLES[side]
        dtype = self._types[role]
        found = self._scaling.of(role, rows_zk, ends_e, dtype)
        bits = self._kernels.quantise_groups(
            rows_zk, found.scale, ends_e, dtype, straight=straight, turned=turned, seen_g=found.seen
        )
        return QuantisedSlots(*bits, found.worth)

    def _own_weight(self, weight_eoi: Tensor) -> tuple[EightBitGroups, EightBitGroups]:
        """Return the matrices [e, o, i] and [e, i, o], quantised once after each ``begin``."""
        if self._weight is None:
            own_eoi, ends_e = weight_eoi.detach(), self._ends_of_weights_e
            dtype = self._types[WEIGHT]
            found = self._scaling.of(WEIGHT, own_eoi.flatten(0, 1), ends_e, dtype)
            bits = self._kernels.quantise_matrices(
                own_eoi, found.scale, ends_e, dtype, seen_g=found.seen
            )
            straight, turned = (EightBitGroups(each, found.worth) for each in bits)
            self._weight = straight, turned
        return self._weight


@dataclass(frozen=True)
class BothSlots:
    """Slots in 8 bits, if a product needs 8 bits, and in the activations' dtype."""

    narrow: QuantisedSlots | None
    wide_zk: Tensor


class WideGroupedWeightGradients:
    """See ``GroupedProducts``: gradients of matrices have the activations' dtype, the rest 8 bits.

    Args:
        narrow: forms the output and the input's gradient.
        plain: forms the gradients of the matrices.
    """

    def __init__(self, narrow: EightBitGroupedProducts, plain: PlainGroupedProducts) -> None:
        self._narrow, self._plain = narrow, plain

    def factor(
        self, side: Side, rows_zk: Tensor, ends_e: Tensor, *, keeps: bool
    ) -> tuple[BothSlots, Kept]:
        """See ``GroupedProducts``."""
        narrow = self._narrow.quantise(side, rows_zk, ends_e)
        return BothSlots(narrow, rows_zk), (rows_zk,) if keeps else ()

    def again(self, side: Side, kept: Kept, ends_e: Tensor) -> BothSlots:
        """See ``GroupedProducts``."""
        return BothSlots(None, kept[0])

    def for_weight(self, side: Side, rows_zk: Tensor, ends_e: Tensor) -> BothSlots:
        """See ``GroupedProducts``."""
        return BothSlots(None, rows_zk)

    def output(self, x: BothSlots, weight_eoi: Tensor, ends_e: Tensor) -> Tensor:
        """See ``GroupedProducts``."""
        assert x.narrow is not None
        return self._narrow.output(x.narrow, weight_eoi, ends_e)

    def input_gradient(self, grad: BothSlots, weight_eoi: Tensor, ends_e: Tensor) -> Tensor:
        """See ``GroupedProducts``."""
        assert grad.narrow is not None
        return self._narrow.input_gradient(grad.narrow, weight_eoi, ends_e)

    def weight_gradient(self, grad: BothSlots, x: BothSlots, ends_e: Tensor) -> Tensor:
        """See ``GroupedProducts``."""
        return self._plain.weight_gradient(grad.wide_zk, x.wide_zk, ends_e)

    def accumulate_(
        self, total_eoi: Tensor, grad: BothSlots, x: BothSlots, ends_e: Tensor, *, begins: bool
    ) -> None:
        """See ``GroupedProducts``."""
        self._plain.accumulate_(total_eoi, grad.wide_zk, x.wide_zk, ends_e, begins=begins)
