"""The state that pass S leaves for T where the output layer works on tiles.

Shapes: as in ``output_s``.
"""

from dataclasses import dataclass

from torch import Tensor

from megatron.kernels.softmax import ShardState
from megatron.parallel.lanes import keep_until_used


@dataclass
class TiledState(ShardState):
    """The state of one microbatch.

    The exponentials in ``exp_tiles`` are relative to the tile's maximum in ``tile_max_kn``, times
    the derivative of the soft-capping if logits are capped.

    Attributes:
        slope_tiles: for each tile [t, n], this derivative; kept only if label smoothing needs it.
        tile_max_kn: for each kept tile, the running maximum at the time of its computation.
        target_row_n: row of the target in this shard; any row if another shard has the target.
        target_slope_n: derivative of the soft-capping at the target (1 without soft-capping); 0 if
            another shard has the target.
        target_gradient_nh: D, the targets' rows of M, which the targets subtract (Algorithm 2
            only).
    """

    slope_tiles: list[Tensor]
    tile_max_kn: Tensor
    target_row_n: Tensor
    target_slope_n: Tensor
    target_gradient_nh: Tensor | None = None

    def drop_gradient(self) -> None:
        """Release A and D; pending work of the current stream may still read them."""
        super().drop_gradient()
        if self.target_gradient_nh is not None:
            keep_until_used(self.target_gradient_nh)
        self.target_gradient_nh = None
