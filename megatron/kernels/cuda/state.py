"""What S leaves for T on a GPU.

Shapes: n tokens, v rows of the shard, h hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kernels.softmax import LossOptions, Merged, ShardState, statistics_dtype
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


def initial_state(x_nh: Tensor, targets_n: Tensor, first_row: int) -> CudaState:
    """Return the state of a shard without rows."""
    statistics_4n = x_nh.new_zeros((4, len(x_nh)), dtype=statistics_dtype(x_nh.dtype))
    statistics_4n[0].fill_(-torch.inf)
    return CudaState(x_nh.contiguous(), (), statistics_4n, None, targets_n, first_row)


def relative_to_all(state: CudaState, merged: Merged) -> CudaState:
    """Return the state for a T that forms exponentials relative to the maximum of all shards."""
    statistics_4n = state.statistics_4n.clone()
    statistics_4n[0] = merged.max_n
    return CudaState(state.x_nh, (), statistics_4n, None, state.targets_n, state.first_row)


def begin_gradient(state: CudaState, weight_vh: Tensor, options: LossOptions) -> None:
    """Give a state room for A and, with label smoothing, for what is subtracted from it."""
    state.raw_gradient_nh = _room_for_sum(state, weight_vh)
    if options.spread and options.logit_softcap:
        state.spread_nh = _room_for_sum(state, weight_vh)
    elif options.spread:
        dtype = state.statistics_4n.dtype
        state.spread_nh = weight_vh.sum(0, keepdim=True, dtype=dtype)


def _room_for_sum(state: CudaState, weight_vh: Tensor) -> Tensor:
    """Return room for a sum over the rows of W [n, h]; it is 0 if there are none."""
    make = torch.empty_like if len(weight_vh) else torch.zeros_like
    return make(state.x_nh, dtype=state.statistics_4n.dtype)
