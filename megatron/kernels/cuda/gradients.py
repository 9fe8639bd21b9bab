"""What C1 and T of a GPU do with a state beside products.

Shapes: n tokens, h hidden size, v rows of the shard without padding, p shards.
"""

import torch
from torch import Tensor

from megatron.kernels.cuda import operators
from megatron.kernels.cuda.state import CudaState
from megatron.kernels.softmax import LossOptions, Merged


def merge(
    statistics_p4n: Tensor,
    state: CudaState,
    weight_vh: Tensor,
    weight_n: Tensor,
    options: LossOptions,
) -> tuple[Merged, Tensor | None]:
    """See ``Kernels``: one kernel."""
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
    """Return X, scaled so that its product with exponentials is the gradient's softmax part."""
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
    """Return this shard's part of the input gradient [n, h], once A is there."""
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
    """Subtract what targets and, unless logits are capped, label smoothing pull in T."""
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


def _form_of(options: LossOptions) -> tuple[float, float, float, float]:
    """Return the target's share of the mass, every entry's, the z-loss and the soft cap."""
    share = 1 - options.label_smoothing
    return share, options.spread, options.z_loss_coeff, options.logit_softcap
