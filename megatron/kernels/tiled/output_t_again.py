"""Pass T where S has kept no exponentials: it forms the logits again, a tile at a time.

Between S and T there are then only a few numbers for each token, and in no pass are all logits of a
shard in memory. It costs one more product. The maximum m over all shards is known by now, so that
all exponentials are relative to m at once, and no tile has factors of its own. Both gradients come
from one tile while it is there.

Shapes: as in ``output_s``.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from megatron.kernels.softmax import LossOptions, Merged, row_factor
from megatron.kernels.tiled.face import TileKernels
from megatron.kernels.tiled.output_s import soft_cap
from megatron.kernels.tiled.output_t import (
    subtract_spread,
    subtract_spread_from_input,
    subtract_target_gradient,
    targets_input_gradient,
)
from megatron.kernels.tiled.state import TiledState

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
    """Pass T: add the weight gradient to ``gradient_vh``.

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
