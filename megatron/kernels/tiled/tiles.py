"""Operations on a tile of vocabulary rows; the tiled output layer consists of these.

Shapes and types: as in ``megatron.kernels.face``.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.kernels.accumulation import Accumulation

EXPONENTIALS_AT_ONCE = 1 << 22
"""How many logits PyTorch's operations turn into exponentials at a time: 16 MiB in fp32. The work
on such a slice takes a GPU longer than the launch of the work on the next slice."""


class TileOperations(Accumulation):
    """The operations on one tile.

    Attributes:
        tile_rows: the most vocabulary rows of a tile.
    """

    tile_rows: int

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
        new_max_n = torch.maximum(max_n, logits_tn.amax(0).to(max_n.dtype))
        shrink_n = (max_n - new_max_n).exp_()
        # Before this tile joins the sum: its exponentials are relative to the new maximum.
        sum_n.mul_(shrink_n)
        for part_tn in _slices(logits_tn):
            # In the dtype of statistics, because a difference in bf16 would be far off.
            exp_tn = (part_tn - new_max_n).exp_()
            sum_n.add_(exp_tn.sum(0))
            part_tn.copy_(exp_tn)
        max_n.copy_(new_max_n)
        return shrink_n

    def shifted_exponentials_(self, logits_tn: Tensor, shift_n: Tensor) -> None:
        """``logits = exp(logits - shift)``: exponentials, once the maximum of all rows is known.

        Args:
            logits_tn: contiguous activations.
            shift_n: statistics; a logit exceeds it by rounding at most.
        """
        for part_tn in _slices(logits_tn):
            part_tn.copy_((part_tn - shift_n).exp_())

    def carry_input_gradient_(
        self, total_nh: Tensor, shrink_n: Tensor, exp_tn: Tensor, weight_th: Tensor
    ) -> None:
        """``total = total * shrink + expᵀ M``: A of Algorithm 2, one tile at a time.

        Args:
            total_nh: statistics.
            shrink_n: result of ``exponentials_`` for these rows.
            exp_tn: exponentials, contiguous activations.
            weight_th: the same rows of M, activations.
        """
        total_nh.mul_(shrink_n.unsqueeze(1)).add_(exp_tn.T @ weight_th)

    def add_input_gradient_(
        self, gradient_nh: Tensor, factor_n: Tensor, exp_tn: Tensor, weight_th: Tensor
    ) -> None:
        """``gradient += factor * expᵀ M``: the softmax part of Algorithm 1's input gradient.

        Args:
            gradient_nh: statistics.
            factor_n: factor from the exponentials to the gradient of the logits, statistics.
            exp_tn: exponentials, contiguous activations.
            weight_th: the same rows of M, activations.
        """
        # Tokens are the rows of this product, so their factor can wait for it, and stays in fp32.
        product_nh = (exp_tn.T @ weight_th).to(gradient_nh.dtype)
        gradient_nh.addcmul_(product_nh, factor_n.unsqueeze(1))

    def add_weight_gradient_(
        self, gradient_th: Tensor, factor_n: Tensor, exp_tn: Tensor, x_nh: Tensor
    ) -> None:
        """``gradient += exp (factor * H)``: the softmax part of the weight gradient.

        Args:
            gradient_th: statistics.
            factor_n: factor from the exponentials to the gradient of the logits, statistics.
            exp_tn: exponentials, contiguous activations.
            x_nh: H, contiguous activations.
        """
        # This product sums over tokens, so their factor must be in it: on H [n, h], not on [t, n].
        scaled_nh = torch.mul(x_nh, factor_n.unsqueeze(1), out=torch.empty_like(x_nh))
        self.accumulate_product_(gradient_th, exp_tn, scaled_nh)


def _slices(logits_tn: Tensor) -> Iterator[Tensor]:
    """Yield parts of a tile, each small enough for its exponentials to be in fp32."""
    yield from logits_tn.split(max(1, EXPONENTIALS_AT_ONCE // logits_tn.shape[1]))
