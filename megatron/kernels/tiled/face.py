"""What the tiled output layer needs from kernels: operations on a tile of vocabulary rows.

Shapes: n tokens, h hidden size, t rows of a tile.
Types: as in ``megatron.kernels.face``.
"""

from typing import Protocol

from torch import Tensor


class TileKernels(Protocol):
    """The operations on one tile.

    Attributes:
        tile_rows: vocabulary rows that are best worked on at a time.
    """

    tile_rows: int

    def accumulate_product_(
        self, total: Tensor, left: Tensor, right: Tensor, *, begins: bool = False
    ) -> None:
        """See ``megatron.kernels.face.Kernels``."""
        ...

    def exponentials_(self, logits_tn: Tensor, max_n: Tensor, sum_n: Tensor) -> Tensor:
        """Turn some rows of logits into exponentials and carry the running maximum and sum on.

        Args:
            logits_tn: logits in, exp(logits - new maximum) out, contiguous activations.
            max_n: running maximum of every token, -inf at first. It is a logit, and therefore exact
                in the activations' type.
            sum_n: running sum of the exponentials relative to the running maximum.

        Returns:
            [n], the factor for all exponentials of earlier rows: exp(old - new maximum).
        """
        ...

    def shifted_exponentials_(self, logits_tn: Tensor, shift_n: Tensor) -> None:
        """``logits = exp(logits - shift)``: exponentials, once the maximum of all rows is known.

        Args:
            logits_tn: contiguous activations.
            shift_n: statistics; no logit exceeds it but by rounding.
        """
        ...

    def carry_input_gradient_(
        self, total_nh: Tensor, shrink_n: Tensor, exp_tn: Tensor, weight_th: Tensor
    ) -> None:
        """``total = total * shrink + Eᵀ W``: A of Algorithm 2, rows of the vocabulary at a time.

        Args:
            total_nh: statistics.
            shrink_n: result of ``exponentials_`` for these rows.
            exp_tn: E, contiguous activations.
            weight_th: the same rows of W, activations.
        """
        ...

    def add_input_gradient_(
        self, gradient_nh: Tensor, factor_n: Tensor, exp_tn: Tensor, weight_th: Tensor
    ) -> None:
        """``gradient += factor * Eᵀ W``: the softmax part of Algorithm 1's input gradient.

        Args:
            gradient_nh: statistics.
            factor_n: factor from E to the gradient of the logits, statistics.
            exp_tn: E, contiguous activations.
            weight_th: the same rows of W, activations.
        """
        ...

    def add_weight_gradient_(
        self, gradient_th: Tensor, factor_n: Tensor, exp_tn: Tensor, x_nh: Tensor
    ) -> None:
        """``gradient += E (factor * X)``: the softmax part of the weight gradient.

        Args:
            gradient_th: statistics.
            factor_n: factor from E to the gradient of the logits, statistics.
            exp_tn: E, contiguous activations.
            x_nh: input of the output layer, contiguous activations.
        """
        ...
