"""The state that pass S leaves for T on a GPU, and the work of C1 and T besides products.

Shapes: n tokens, h hidden size, v rows of the shard without padding, p shards.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kernels.cuda import operators
from megatron.kernels.rows import local_rows
from megatron.kernels.softmax import LossOptions, Merged, ShardState, statistics_dtype
from megatron.parallel.lanes import keep_until_used


@dataclass
class CudaState(ShardState):
    """The state of one microbatch.

    ``exp_tiles`` has one matrix [v, n], or none: exponentials relative to ``maximum_n``, times the
    derivative of the soft-capping if logits are capped.

    Attributes:
        targets_n: target ids over the whole vocabulary.
        first_row: vocabulary id of the shard's first row.
        slopes_vn: the derivative of the soft-capping, kept only if label smoothing needs it.
        spread_nh: sum of the rows of M. Label smoothing subtracts it, times its share, from the
            input gradient. One row [1, h] holds for all tokens. If logits are capped it is [n, h]:
            rows are weighted by the derivative of the soft-capping.
    """

    targets_n: Tensor
    first_row: int
    slopes_vn: Tensor | None = None
    spread_nh: Tensor | None = None

    def drop_gradient(self) -> None:
        """Release A and ``spread_nh``; see the base class."""
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
    """Return a state for T to form exponentials again, relative to the maximum of all shards."""
    statistics_4n = state.statistics_4n.clone()
    statistics_4n[0] = merged.max_n
    return CudaState(state.x_nh, (), statistics_4n, None, state.targets_n, state.first_row)


def begin_gradient(state: CudaState, weight_vh: Tensor, options: LossOptions) -> None:
    """Give a state memory for A and, with label smoothing, ``spread_nh`` or memory for it."""
    state.raw_gradient_nh = _room_for_sum(state, weight_vh)
    if options.spread and options.logit_softcap:
        state.spread_nh = _room_for_sum(state, weight_vh)
    elif options.spread:
        dtype = state.statistics_4n.dtype
        state.spread_nh = weight_vh.sum(0, keepdim=True, dtype=dtype)


def _room_for_sum(state: CudaState, weight_vh: Tensor) -> Tensor:
    """Return memory for a sum over the rows of M [n, h]; zeros if M has no rows."""
    make = torch.empty_like if len(weight_vh) else torch.zeros_like
    return make(state.x_nh, dtype=state.statistics_4n.dtype)


def merge(
    statistics_p4n: Tensor,
    state: CudaState,
    weight_vh: Tensor,
    weight_n: Tensor,
    options: LossOptions,
) -> tuple[Merged, Tensor | None]:
    """See ``Kernels``; it is one kernel."""
    merged_4n, gradient_nh = torch.empty_like(statistics_p4n[0]), None
    if state.raw_gradient_nh is None:
        operators.merge(statistics_p4n, merged_4n)
    else:
        gradient_nh = torch.empty_like(state.x_nh)
        operators.merge_input_gradient(
            statistics_p4n,
            merged_4n,
            gradient_nh,
            state.raw_gradient_nh,
            weight_vh,
            state.spread_nh,
            weight_n,
            state.maximum_n,
            state.targets_n,
            state.statistics_4n[2],
            state.first_row,
            *_form_of(options),
        )
    return Merged(*merged_4n), gradient_nh


def scaled_input(
    state: CudaState, merged: Merged, weight_n: Tensor, options: LossOptions
) -> Tensor:
    """Return H, scaled so that its product with exponentials is the gradient's softmax part."""
    scaled_nh = torch.empty_like(state.x_nh)
    operators.scale_rows(
        scaled_nh,
        state.x_nh,
        weight_n,
        state.maximum_n,
        merged.max_n,
        merged.sum_n,
        options.z_loss_coeff,
    )
    return scaled_nh


def input_gradient(
    state: CudaState, merged: Merged, weight_vh: Tensor, weight_n: Tensor, options: LossOptions
) -> Tensor:
    """Return this shard's part of the input gradient [n, h], from A."""
    assert state.raw_gradient_nh is not None
    gradient_nh = torch.empty_like(state.x_nh)
    operators.input_gradient(
        gradient_nh,
        state.raw_gradient_nh,
        weight_vh,
        state.spread_nh,
        weight_n,
        state.maximum_n,
        merged.max_n,
        merged.sum_n,
        state.targets_n,
        state.statistics_4n[2],
        state.first_row,
        *_form_of(options),
    )
    return gradient_nh


def subtract_targets(
    gradient_vh: Tensor, state: CudaState, weight_n: Tensor, options: LossOptions
) -> None:
    """Subtract the targets' part from the weight gradient, and label smoothing's without a cap."""
    if torch.are_deterministic_algorithms_enabled():
        _subtract_in_order(gradient_vh, state, weight_n, options)
    else:
        operators.subtract_targets_(
            gradient_vh,
            state.x_nh,
            weight_n,
            state.targets_n,
            state.statistics_4n[2],
            state.first_row,
            1 - options.label_smoothing,
            options.logit_softcap,
        )
    if options.spread and not options.logit_softcap:
        gradient_vh -= options.spread * (weight_n.unsqueeze(1) * state.x_nh).sum(0)


def _subtract_in_order(
    gradient_vh: Tensor, state: CudaState, weight_n: Tensor, options: LossOptions
) -> None:
    """Subtract the targets' part, of tokens with the same target in the order of their places.

    The Triton program subtracts by atomic additions, whose order is that in which thread blocks
    end. PyTorch sorts the rows first if deterministic algorithms are on. The products [n, h] in
    fp32 are the price.
    """
    row_n, owned_n = local_rows(state.targets_n, state.first_row, len(gradient_vh))
    pull_n = weight_n * (1 - options.label_smoothing)
    if cap := options.logit_softcap:
        pull_n = pull_n * (1 - (state.statistics_4n[2] / cap) ** 2)  # the slope of the capping
    pull_n = torch.where(owned_n, pull_n, 0)
    pulled_nh = (state.x_nh * pull_n.unsqueeze(1)).to(gradient_vh.dtype)
    gradient_vh.index_add_(0, row_n, pulled_nh, alpha=-1)


def _form_of(options: LossOptions) -> tuple[float, float, float, float]:
    """Return the target's share of the mass, that of every entry, the z-loss weight and the cap."""
    share = 1 - options.label_smoothing
    return share, options.spread, options.z_loss_coeff, options.logit_softcap
