"""Linear layers in 8 bits: input, weight and gradient of the output are scaled and rounded.

A layer has three products, for the output, the input's gradient and the weight's gradient. Tensor
cores multiply rows of one *factor* with rows of the other. The first product reads rows of the
input and of the weight; the second, rows of the gradient and columns of the weight; the third,
columns of the gradient and of the input. So the weight is kept in both layouts, and the factors of
the third product are kept *turned* (by columns), in 8 bits. A weight is quantised when an iteration
first needs it.

A *multiplier* quantises and multiplies. There are six: by the kernels with one scale for a tensor,
for a linear layer (``kernel_multiplier.py``) and for a layer of experts
(``experts/eight_bit_products.py``); by the kernels with scales of blocks, for both kinds of layers
(``block_multiplier.py``); by the kernels with scales of 32 numbers (``mx_multiplier.py``); by
Transformer Engine (``engine_multiplier.py``); and one whose third product is in the activations'
dtype (``wide_weight_gradients.py``). The strategies of both kinds of
layers keep factors for W, and leave the rest to a multiplier.

Ranks that share tokens gather them before quantising, so that all ranks use the same scale. Each
rank keeps its own tokens, and gathers them again later.

As in Transformer Engine, the sums of the first product may have fewer bits than fp32 on GPUs where
that is faster; gradients are summed in fp32.

Shapes: ``...`` any leading dimensions, n their product, i input features, o output features, e
experts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Literal, TypeAlias

from torch import Tensor

from megatron.layers.products import Factor, FormsNorm, Kept, Then
from megatron.layers.scales import GRADIENT, INPUT, WEIGHT, Role
from megatron.parallel.lanes import Done, Pending
from megatron.parallel.tensor import TensorParallel

Layouts: TypeAlias = Literal["rows", "columns", "both"]
"""A factor by rows, for the first or second product; by columns, for the third; or by both."""

Ends: TypeAlias = Tensor | None
"""The ends of the experts' slots; ``None``: the layer has no experts."""


class Multiplier(ABC, Generic[Factor]):
    """Quantises the tensors of one layer, and multiplies them.

    Attributes:
        accumulates: see ``Products``.
    """

    accumulates = True

    @abstractmethod
    def factor(self, role: Role, x: Tensor, layouts: Layouts, ends_e: Ends = None) -> Factor:
        """Return a tensor [..., k] in 8 bits.

        Args:
            role: the tensor's role in the layer.
            x: the tensor.
            layouts: in which layouts.
            ends_e: ends of the experts' slots.
        """

    def weight(self, weight: Tensor) -> Factor:
        """Return the weight in 8 bits, by rows and by columns."""
        return self.factor(WEIGHT, weight, "both")

    @abstractmethod
    def gathered_weight(self, bits_rk: Tensor, worth_gbc: Tensor) -> Factor:
        """Return a weight that is in 8 bits already, by rows and by columns.

        Args:
            bits_rk: see ``GatheredWeight.give``; kept, and not copied.
            worth_gbc: the same.
        """

    def tensors(self, weight: Factor) -> Sequence[Tensor]:
        """Return the tensors of a weight in 8 bits, so that a later one can be written to them.

        Only runs with graphs of passes call this, and these are refused for Transformer Engine.
        """
        raise AssertionError(f"{type(weight).__name__} is a tensor of another package")

    def norm(self, x: Tensor) -> FormsNorm[Factor] | None:
        """See ``Products.of_norm``; by default ``None``."""

    @abstractmethod
    def kept(self, role: Role, factor: Factor) -> Kept:
        """Return the tensors to keep of a factor by columns."""

    @abstractmethod
    def again(self, role: Role, kept: Kept, ends_e: Ends = None) -> Factor:
        """Make a factor of the third product from the kept tensors."""

    def shared(
        self, role: Role, x: Tensor, whole: Tensor, ranks: TensorParallel
    ) -> tuple[Factor, Kept]:
        """Return a factor of tokens that ranks share, and the tensors to keep of own tokens.

        By default own tokens are kept as they are. The same numbers give the same bits later.

        Args:
            role: the tensor's role in the layer.
            x: own tokens.
            whole: the tokens of all ranks.
            ranks: the ranks.
        """
        # A backward that is not split multiplies the gradient by its columns, too.
        return self.factor(role, whole, "both" if role == GRADIENT else "rows"), (x,)

    def gathered(self, role: Role, kept: Kept) -> tuple[Tensor, Callable[[Tensor], Factor]]:
        """Return kept tokens to gather, and a function: all tokens -> factor of the third product.

        The third product is the gradient of the weight.
        """
        return kept[0], partial(self.factor, role, layouts="columns")

    @abstractmethod
    def output(self, x: Factor, weight: Factor, bias: Tensor | None) -> Tensor:
        """See ``Products``; the weight is in 8 bits here, and below."""

    @abstractmethod
    def input_gradient(self, grad: Factor, weight: Factor) -> Tensor:
        """See ``Products``."""

    @abstractmethod
    def weight_gradient(self, grad: Factor, x: Factor) -> Tensor:
        """See ``Products``."""

    @abstractmethod
    def accumulate_(self, total: Tensor, grad: Factor, x: Factor, *, begins: bool) -> None:
        """See ``Products``."""


class ByMultiplier(Generic[Factor]):
    """The common part of the strategies of linear layers and of layers of experts.

    Args:
        multiplier: of the layer.
        keeps_input: keep the input unquantised, because it is in memory anyway or is computed
            again; it is quantised a second time for the weight's gradient.
    """

    are_autograds = False
    keeps_parts = False  # the numbers in 8 bits are kept, which nothing else has

    def __init__(self, multiplier: Multiplier[Factor], *, keeps_input: bool = False) -> None:
        self._multiplier, self._keeps_input = multiplier, keeps_input
        self.accumulates = multiplier.accumulates
        self._weight: Factor | None = None
        self._place: Factor | None = None
        self._gathered: tuple[Tensor, Tensor] | None = None

    def give(self, bits_rk: Tensor, worth_gbc: Tensor) -> None:
        """Multiply by this weight from now on; see ``GatheredWeight.give``."""
        self._weight, self._gathered = None, (bits_rk, worth_gbc)

    def begin(self) -> None:
        """Forget the quantised weight, which may have another value now."""
        self._weight = None

    def renew(self, weight: Tensor) -> None:
        """Quantise the weight now, and from now on always into the same memory.

        Graphs of passes read it there. A weight that was quantised within a graph would be
        quantised in every replay of this graph, and by no other graph.
        """
        self._place = self._own(weight)

    def output(self, x: Factor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``Products``."""
        return self._multiplier.output(x, self._own(weight), bias)

    def input_gradient(self, grad: Factor, weight: Tensor) -> Tensor:
        """See ``Products``."""
        return self._multiplier.input_gradient(grad, self._own(weight))

    def weight_gradient(self, grad: Factor, x: Factor) -> Tensor:
        """See ``Products``."""
        return self._multiplier.weight_gradient(grad, x)

    def accumulate_(self, total: Tensor, grad: Factor, x: Factor, *, begins: bool) -> None:
        """See ``Products``."""
        self._multiplier.accumulate_(total, grad, x, begins=begins)

    def _own(self, weight: Tensor) -> Factor:
        """Return the weight in 8 bits; it is quantised once after each call of ``begin``."""
        if self._weight is None:
            multiplier, place = self._multiplier, self._place
            if self._gathered is not None:
                self._weight = multiplier.gathered_weight(*self._gathered)
            else:
                self._weight = multiplier.weight(weight.detach())
            if place is not None:
                new = multiplier.tensors(self._weight)
                for old, own in zip(multiplier.tensors(place), new, strict=True):
                    old.copy_(own)
                self._weight = place
        return self._weight


class EightBitProducts(ByMultiplier[Factor]):
    """See ``Products``: a linear layer multiplies in 8 bits."""

    def of_input(self, x: Tensor, ranks: TensorParallel) -> tuple[Factor, Kept]:
        """See ``Products``."""
        if self._keeps_input:
            return self._multiplier.factor(INPUT, ranks.gather(x), "rows"), (x,)
        return self._factor(INPUT, x, ranks)

    def of_norm(self, x: Tensor, ranks: TensorParallel) -> FormsNorm[Factor] | None:
        """See ``Products``."""
        is_alone = not self._keeps_input and ranks.sequence_parts == 1
        return self._multiplier.norm(x) if is_alone else None

    def of_gradient(self, grad: Tensor, ranks: TensorParallel) -> tuple[Factor, Kept]:
        """See ``Products``."""
        return self._factor(GRADIENT, grad, ranks)

    def start_input_again(self, kept: Kept, ranks: TensorParallel) -> Pending[Factor]:
        """See ``Products``."""
        if self._keeps_input:
            columns = partial(self._multiplier.factor, INPUT, layouts="columns")
            return Then(ranks.start_gather(kept[0]), columns)
        return self._again(INPUT, kept, ranks)

    def start_gradient_again(self, kept: Kept, ranks: TensorParallel) -> Pending[Factor]:
        """See ``Products``."""
        return self._again(GRADIENT, kept, ranks)

    def _factor(self, role: Role, x: Tensor, ranks: TensorParallel) -> tuple[Factor, Kept]:
        multiplier, whole = self._multiplier, ranks.gather(x)
        if ranks.sequence_parts > 1:
            return multiplier.shared(role, x, whole, ranks)
        factor = multiplier.factor(role, whole, "both")
        return factor, multiplier.kept(role, factor)

    def _again(self, role: Role, kept: Kept, ranks: TensorParallel) -> Pending[Factor]:
        if ranks.sequence_parts == 1:
            return Done(self._multiplier.again(role, kept))
        own, whole_factor = self._multiplier.gathered(role, kept)
        return Then(ranks.start_gather(own), whole_factor)
