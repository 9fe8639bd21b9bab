"""The naive output layer: the textbook's softmax, with a barrier wherever it needs all shards.

It has three barriers (arXiv 2411.05288, section 4); ``output_s`` has one or two. S forms the
logits, C1 takes their maximum m over ranks, E forms the exponentials relative to m, C2 sums them
over ranks, T forms both gradients as in Algorithm 1, and C3 reduces the input gradient. The other
treatments are compared with this one.

Shapes: as in ``output_s``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.kernels.softmax import LossOptions
from megatron.kernels.tiled.face import TileKernels
from megatron.kernels.tiled.output_s import initial_state
from megatron.kernels.tiled.state import TiledState


def naive_s(
    x_nh: Tensor,
    weight_vh: Tensor,
    targets_n: Tensor,
    first_row: int,
    options: LossOptions,
    logit_tiles: Sequence[Tensor],
) -> TiledState:
    """Pass S: the logits of one shard, and ``maximum_n`` of the state, -inf without a real row.

    Args:
        x_nh: input of the output layer.
        weight_vh: this rank's rows, without padding.
        targets_n: target ids over the whole vocabulary, int64.
        first_row: vocabulary id of ``weight_vh[0]``.
        options: form of the loss.
        logit_tiles: contiguous [t, n] buffers, their heights summing to v, that receive the
            logits; E turns them into the exponentials.
    """
    state, _ = initial_state(x_nh, weight_vh, targets_n, first_row, options, len(logit_tiles))
    state.exp_tiles = logit_tiles
    max_n, cap = state.maximum_n, options.logit_softcap
    tiles_th = weight_vh.split([len(tile) for tile in logit_tiles])
    for tile_tn, tile_th in zip(logit_tiles, tiles_th, strict=True):
        torch.mm(tile_th, x_nh.T, out=tile_tn)
        if cap:
            tile_tn.div_(cap).tanh_().mul_(cap)
        torch.maximum(max_n, tile_tn.amax(0).to(max_n.dtype), out=max_n)
    return state


def naive_e(
    state: TiledState, maximum_n: Tensor, options: LossOptions, kernels: TileKernels
) -> None:
    """Pass E: exponentials relative to m, in place, and ``sums_kn`` of the state.

    Afterwards the state has the form that T of Algorithm 1 expects.

    Args:
        state: the state that S left.
        maximum_n: m, the maximum over all ranks.
        options: form of the loss.
        kernels: of the device and type of the activations.
    """
    state.tile_max_kn.copy_(maximum_n)
    max_n, sum_n, _, logit_sum_n = state.statistics_4n
    max_n.copy_(maximum_n)
    for tile_tn in state.exp_tiles:
        if options.label_smoothing:
            logit_sum_n += tile_tn.sum(0, dtype=logit_sum_n.dtype)
        slope_tn = None
        if options.logit_softcap:
            slope_tn = 1 - (tile_tn / options.logit_softcap).square_()
        kernels.exponentials_(tile_tn, max_n, sum_n)  # no logit exceeds m, so m stays
        if slope_tn is not None:
            tile_tn.mul_(slope_tn)
            if options.label_smoothing:
                state.slope_tiles.append(slope_tn)
