"""Sums of gradients over microbatches, in PyTorch's operations; reference and tiled kernels add so.

Shapes and types: as in ``megatron.kernels.face``.
"""

from torch import Tensor


class Accumulation:
    """Operations that add to the gradients of earlier microbatches."""

    def accumulate_(self, total: Tensor, part: Tensor) -> None:
        """``total += part``: one microbatch's gradient joins the sum over microbatches.

        Args:
            total: the sum so far, of any shape with a first dimension, with any strides.
            part: of the same shape, in the type of activations or of ``total``.
        """
        total.add_(part)

    def accumulate_product_(
        self, total: Tensor, left: Tensor, right: Tensor, *, begins: bool = False
    ) -> None:
        """``total += left @ right``; the product may be rounded to the activations' type.

        Args:
            total: [i, j], as in ``accumulate_``.
            left: activations [i, n].
            right: activations [n, j].
            begins: the sum begins with this product, and the old content of ``total`` is ignored.
        """
        if begins:
            total.copy_(left @ right)
        else:
            self.accumulate_(total, left @ right)
