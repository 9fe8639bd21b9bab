"""What S leaves for T on a GPU.

Shapes: n tokens, v rows of the shard, h hidden size.
"""

from dataclasses import dataclass

from torch import Tensor

from megatron.kernels.softmax import ShardState
from megatron.parallel.lanes import keep_until_used


@dataclass
class CudaState(ShardState):
    """The state of one microbatch.

    ``exp_tiles`` is one [v, n], or nothing: exponentials relative to ``maximum_n``, times the
    derivative of the soft-capping if there is one.

    Attributes:
        targets_n: target ids over the whole vocabulary.
        first_row: vocabulary id of the shard's first row.
        slopes_vn: the derivative of the soft-capping, kept only if label smoothing needs it.
        spread_nh: what label smoothing subtracts from A for every token, before its share, or one
            row [h] that holds for all of them (Algorithm 2 only).
    """

    targets_n: Tensor
    first_row: int
    slopes_vn: Tensor | None = None
    spread_nh: Tensor | None = None

    def drop_gradient(self) -> None:
        """Release A and its share of label smoothing; see the base class."""
        super().drop_gradient()
        if self.spread_nh is not None:
            keep_until_used(self.spread_nh)
        self.spread_nh = None
