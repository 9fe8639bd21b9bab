"""The output layer up to its barrier, pass S, as pure functions (arXiv 2411.05288, section 4).

Every rank holds a shard of the vocabulary. S does all work that needs no other rank, C1 merges a
few statistics per token, T (in ``output_t``) does the rest. The [v, n] matrix of exponentials
exists once, in the activation dtype, in tiles of vocabulary rows; or only a tile of it at a time,
if T is to form the tiles again (``t_again``). On a CPU a tile stays in cache while it is in
use. As in flash attention, each tile is relative to the running maximum at the time it was
computed; a factor per token and tile corrects this wherever the tile is used. Vocabulary is the
first dimension and tokens the second, so that two of the three products read the large matrices in
their memory order.

Shapes: n tokens (sequence x batch), h hidden size, v rows of this rank's shard without padding,
t rows of one tile, k tiles. Statistics are fp32 (float64 for float64 activations).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.kernels.rows import local_rows, rows_of
from megatron.kernels.softmax import LossOptions, Merged, row_factor, statistics_dtype
from megatron.kernels.tiled.face import TileKernels
from megatron.kernels.tiled.state import TiledState


def tile_heights(rows: int, at_most: int) -> list[int]:
    """Split ``rows`` vocabulary rows into nearly equal tiles of no more than ``at_most``."""
    tiles = -(-rows // at_most)
    return [rows * (i + 1) // tiles - rows * i // tiles for i in range(tiles)]


def output_s(
    x_nh: Tensor,
    weight_vh: Tensor,
    targets_n: Tensor,
    first_row: int,
    options: LossOptions,
    exp_tiles: Sequence[Tensor],
    *,
    form_gradient: bool,
    keep: bool = True,
    kernels: TileKernels,
) -> TiledState:
    """Pass S: all work of the output layer that one shard can do alone.

    Args:
        x_nh: input of the output layer.
        weight_vh: this rank's rows, without padding.
        targets_n: target ids over the whole vocabulary, int64.
        first_row: vocabulary id of ``weight_vh[0]``.
        options: form of the loss.
        exp_tiles: contiguous [t, n] buffers, their heights summing to v, that receive the
            exponentials. If they are not kept they may share their memory.
        form_gradient: also form A and D, as Algorithm 2 does.
        keep: the exponentials, for T. An evaluation needs only the statistics, and so does a T that
            forms the exponentials again.
        kernels: of the device and type of ``x_nh``.
    """
    kept = exp_tiles if keep else ()
    state, target_nh = initial_state(x_nh, weight_vh, targets_n, first_row, options, len(kept))
    state.exp_tiles = kept
    max_n, sum_n, _, logit_sum_n = state.statistics_4n
    if form_gradient:
        state.raw_gradient_nh = torch.zeros_like(x_nh, dtype=max_n.dtype)
        state.target_gradient_nh = target_gradient(state, target_nh, weight_vh, options)
    del target_nh  # needed only for D
    tiles_th = weight_vh.split([len(tile) for tile in exp_tiles])
    for k, (tile_tn, tile_th) in enumerate(zip(exp_tiles, tiles_th, strict=True)):
        torch.mm(tile_th, x_nh.T, out=tile_tn)
        slope_tn = soft_cap(tile_tn, options.logit_softcap)
        if options.label_smoothing:
            logit_sum_n += tile_tn.sum(0, dtype=logit_sum_n.dtype)
        shrink_n = kernels.exponentials_(tile_tn, max_n, sum_n)
        if keep:
            state.tile_max_kn[k].copy_(max_n)
        if slope_tn is not None:
            tile_tn.mul_(slope_tn)
            if options.label_smoothing and keep:
                state.slope_tiles.append(slope_tn)
        if state.raw_gradient_nh is not None:
            kernels.carry_input_gradient_(state.raw_gradient_nh, shrink_n, tile_tn, tile_th)
        if state.target_gradient_nh is not None and slope_tn is not None and options.spread:
            state.target_gradient_nh.add_(slope_tn.T @ tile_th, alpha=options.spread)
    return state


def initial_state(
    x_nh: Tensor,
    weight_vh: Tensor,
    targets_n: Tensor,
    first_row: int,
    options: LossOptions,
    tiles: int,
) -> tuple[TiledState, Tensor]:
    """Return the state before the first of k kept ``tiles``, and the targets' rows of W [n, h]."""
    dtype = statistics_dtype(x_nh.dtype)
    statistics_4n = torch.zeros((4, len(x_nh)), dtype=dtype, device=x_nh.device)
    statistics_4n[0] = -torch.inf
    target_row_n, owned_n = local_rows(targets_n, first_row, len(weight_vh))
    slope_n = owned_n.to(dtype)
    target_nh = target_rows(weight_vh, target_row_n, dtype)
    # Round as the matrix product does; otherwise a well predicted token could have a loss below 0.
    logit_n = (target_nh * x_nh).sum(1).to(x_nh.dtype)
    capped_slope_n = soft_cap(logit_n, options.logit_softcap)
    statistics_4n[2] = torch.where(owned_n, logit_n.to(dtype), 0.0)
    if capped_slope_n is not None:
        slope_n = slope_n * capped_slope_n
    tile_max_kn = statistics_4n.new_empty((tiles, len(x_nh)))
    state = TiledState(x_nh, (), statistics_4n, None, [], tile_max_kn, target_row_n, slope_n)
    return state, target_nh


def target_rows(weight_vh: Tensor, row_n: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the targets' rows of W [n, h]: any row for other shards' targets, 0 if W has none."""
    if not len(weight_vh):
        return weight_vh.new_zeros((len(row_n), weight_vh.shape[1]), dtype=dtype)
    return rows_of(weight_vh, row_n).to(dtype)


def soft_cap(logits: Tensor, cap: float) -> Tensor | None:
    """Cap ``logits`` in place; return the derivative, or ``None`` without a cap."""
    if not cap:
        return None
    logits.div_(cap).tanh_()
    slope = 1 - logits.square()
    logits.mul_(cap)
    return slope


def target_gradient(
    state: TiledState, target_nh: Tensor, weight_vh: Tensor, options: LossOptions
) -> Tensor:
    """Return D: the weighted rows of W of the targets, and of the spread without soft-capping.

    Args:
        state: of the microbatch.
        target_nh: result of ``target_rows``; is changed in place.
        weight_vh: this rank's rows, without padding.
        options: form of the loss.
    """
    gradient_nh = target_nh.mul_(
        ((1 - options.label_smoothing) * state.target_slope_n).unsqueeze(1)
    )
    if options.label_smoothing and not options.logit_softcap:
        gradient_nh += options.spread * weight_vh.sum(0, dtype=gradient_nh.dtype)
    return gradient_nh


def input_gradient_from_s(
    state: TiledState, merged: Merged, weight_n: Tensor, options: LossOptions
) -> Tensor:
    """Return this shard's part of the input gradient [n, h] in Algorithm 2, once C1 has merged.

    Args:
        state: the state that S left, with A and D.
        merged: statistics over the whole vocabulary.
        weight_n: g, the weight of each token's loss.
        options: form of the loss.
    """
    assert state.raw_gradient_nh is not None
    assert state.target_gradient_nh is not None
    local_max_n = state.statistics_4n[0]
    factor_n = row_factor(merged, options) * (local_max_n - merged.max_n).exp()
    gradient_nh = state.raw_gradient_nh * (weight_n * factor_n).unsqueeze(1)
    gradient_nh.addcmul_(state.target_gradient_nh, weight_n.unsqueeze(1), value=-1)
    return gradient_nh.to(state.x_nh.dtype)
