"""The output layer after its barrier, pass T, as pure functions (arXiv 2411.05288, section 4).

The statistics of the whole vocabulary give a factor per token and tile. This factor turns the
exponentials that S left into the gradient of the logits. It scales the rows of X and of the
products, never the [v, n] matrix.

Where S has kept no exponentials, T forms the logits again, a tile at a time (``t_again``). Between
S and T there are then only a few numbers for each token, and in no pass are all logits of a shard
in memory. It costs one more product. The maximum m over all shards is known by now, so that all
exponentials are relative to m at once, and no tile has factors of its own. Both gradients come from
one tile while it is there.

Shapes: as in ``output_s``.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from megatron.kernels.softmax import LossOptions, Merged, row_factor
from megatron.kernels.tiled.face import TileKernels
from megatron.kernels.tiled.output_s import soft_cap, target_gradient, target_rows
from megatron.kernels.tiled.state import TiledState


def input_gradient_in_t(
    state: TiledState,
    weight_vh: Tensor,
    merged: Merged,
    weight_n: Tensor,
    options: LossOptions,
    kernels: TileKernels,
) -> Tensor:
    """Return this shard's part of the input gradient [n, h]; in Algorithm 1, T forms it."""
    factor_kn = tile_factors(state, merged, weight_n, options)
    gradient_nh = targets_input_gradient(state, weight_vh, weight_n, options)
    tiles_th = weight_vh.split([len(tile) for tile in state.exp_tiles])
    for tile_tn, tile_th, factor_n in zip(state.exp_tiles, tiles_th, factor_kn, strict=True):
        kernels.add_input_gradient_(gradient_nh, factor_n, tile_tn, tile_th)
    row = 0
    for slope_tn in state.slope_tiles:
        tile_th = weight_vh[row : row + len(slope_tn)]
        subtract_spread_from_input(gradient_nh, slope_tn, tile_th, weight_n, options)
        row += len(slope_tn)
    return gradient_nh.to(state.x_nh.dtype)


def targets_input_gradient(
    state: TiledState, weight_vh: Tensor, weight_n: Tensor, options: LossOptions
) -> Tensor:
    """Return the part of the input gradient that the targets subtract, -g D, [n, h]."""
    target_nh = target_rows(weight_vh, state.target_row_n, weight_n.dtype)
    gradient_nh = target_gradient(state, target_nh, weight_vh, options)
    return gradient_nh.mul_(-weight_n.unsqueeze(1))


def subtract_spread_from_input(
    gradient_nh: Tensor, slope_tn: Tensor, tile_th: Tensor, weight_n: Tensor, options: LossOptions
) -> None:
    """Subtract a tile's part of label smoothing from the input gradient of capped logits."""
    gradient_nh -= (options.spread * weight_n).unsqueeze(1) * (slope_tn.T @ tile_th)


def tile_factors(
    state: TiledState, merged: Merged, weight_n: Tensor, options: LossOptions
) -> Tensor:
    """Return [k, n], each tile's factors from exponentials to the gradient of the logits."""
    return (state.tile_max_kn - merged.max_n).exp() * (weight_n * row_factor(merged, options))


def add_weight_gradient(
    gradient_vh: Tensor, state: TiledState, factor_kn: Tensor, kernels: TileKernels
) -> None:
    """Add the softmax part of the weight gradient, E^T X, to ``gradient_vh`` (pass T).

    The rows of X are scaled, never the [v, n] matrix.

    Args:
        gradient_vh: main gradient of this rank's rows, without padding.
        state: of the microbatch.
        factor_kn: result of ``tile_factors``.
        kernels: of the device and type of the activations.
    """
    row = 0
    for tile_tn, factor_n in zip(state.exp_tiles, factor_kn, strict=True):
        gradient_th = gradient_vh[row : row + len(tile_tn)]
        kernels.add_weight_gradient_(gradient_th, factor_n, tile_tn, state.x_nh)
        row += len(tile_tn)


def subtract_target_gradient(
    gradient_vh: Tensor, state: TiledState, weight_n: Tensor, options: LossOptions
) -> None:
    """Subtract the part of targets and label smoothing from the weight gradient (T)."""
    if not len(gradient_vh):
        return
    pull_n = weight_n * ((1 - options.label_smoothing) * state.target_slope_n)
    pulled_nh = (state.x_nh * pull_n.unsqueeze(1)).to(gradient_vh.dtype)
    gradient_vh.index_add_(0, state.target_row_n, pulled_nh, alpha=-1)
    if not options.label_smoothing:
        return
    weighted_nh = state.x_nh * weight_n.unsqueeze(1)
    if not options.logit_softcap:
        gradient_vh -= options.spread * weighted_nh.sum(0)
    row = 0
    for slope_tn in state.slope_tiles:
        subtract_spread(gradient_vh[row : row + len(slope_tn)], slope_tn, weighted_nh, options)
        row += len(slope_tn)


def subtract_spread(
    gradient_th: Tensor, slope_tn: Tensor, weighted_nh: Tensor, options: LossOptions
) -> None:
    """Subtract a tile's part of label smoothing from the weight gradient of capped logits.

    Args:
        gradient_th: of the tile's rows.
        slope_tn: derivative of the soft-capping.
        weighted_nh: g X.
        options: form of the loss.
    """
    gradient_th -= slope_tn @ (options.spread * weighted_nh).to(slope_tn.dtype)


LEAST_TILES: Final = 4
"""Tiles of a shard, at least: otherwise one tile could be all of a shard of a GPU."""


def tile_rows(rows: int, at_most: int) -> int:
    """Return the rows of a tile of logits that are not kept.

    Args:
        rows: of the shard.
        at_most: rows that the device's kernels like to work on at a time.
    """
    return max(1, min(at_most, -(-rows // LEAST_TILES)))


def t_again(
    state: TiledState,
    weight_vh: Tensor,
    gradient_vh: Tensor | None,
    merged: Merged,
    weight_n: Tensor,
    options: LossOptions,
    tiles: Sequence[Tensor],
    *,
    form_gradient: bool,
    kernels: TileKernels,
) -> Tensor | None:
    """Pass T without exponentials of S: add the weight gradient to ``gradient_vh``.

    Args:
        state: the state that S left, without exponentials.
        weight_vh: this rank's rows, without padding.
        gradient_vh: fp32 gradient of these rows; ``None``: it is not formed.
        merged: statistics over the whole vocabulary.
        weight_n: g, the weight of each token's loss.
        options: form of the loss.
        tiles: contiguous [t, n] buffers, their heights summing to v, for the logits. They may share
            their memory.
        form_gradient: also form this shard's part of the input gradient, as Algorithm 1 does.
        kernels: of the device and type of the activations.

    Returns:
        The input gradient [n, h], or ``None`` without ``form_gradient``.
    """
    x_nh, gradient_nh = state.x_nh, None
    if form_gradient:
        gradient_nh = targets_input_gradient(state, weight_vh, weight_n, options)
    if gradient_vh is not None:
        subtract_target_gradient(gradient_vh, state, weight_n, options)
    factor_n = weight_n * row_factor(merged, options)
    scaled_nh = torch.mul(x_nh, factor_n.unsqueeze(1), out=torch.empty_like(x_nh))
    end = 0
    for tile_tn in tiles:
        rows = slice(end, end := end + len(tile_tn))
        tile_th = weight_vh[rows]
        slope_tn = _exponentials_(tile_tn, tile_th, x_nh, merged, options, kernels)
        spreads = slope_tn if options.label_smoothing else None
        if gradient_vh is not None:
            kernels.accumulate_product_(gradient_vh[rows], tile_tn, scaled_nh)
            if spreads is not None:
                weighted_nh = x_nh * weight_n.unsqueeze(1)
                subtract_spread(gradient_vh[rows], spreads, weighted_nh, options)
        if gradient_nh is not None:
            kernels.add_input_gradient_(gradient_nh, factor_n, tile_tn, tile_th)
            if spreads is not None:
                subtract_spread_from_input(gradient_nh, spreads, tile_th, weight_n, options)
    return None if gradient_nh is None else gradient_nh.to(x_nh.dtype)


def _exponentials_(
    tile_tn: Tensor,
    tile_th: Tensor,
    x_nh: Tensor,
    merged: Merged,
    options: LossOptions,
    kernels: TileKernels,
) -> Tensor | None:
    """Fill a tile with exponentials relative to m, times the soft-capping's derivative.

    Returns:
        The derivative [t, n], or ``None`` without soft-capping.
    """
    torch.mm(tile_th, x_nh.T, out=tile_tn)
    slope_tn = soft_cap(tile_tn, options.logit_softcap)
    kernels.shifted_exponentials_(tile_tn, merged.max_n)
    if slope_tn is not None:
        tile_tn.mul_(slope_tn)
    return slope_tn
