"""The output layer up to its barriers: passes S and E, and C1 (arXiv 2411.05288, section 4).

Every rank holds a shard of the vocabulary. S does all work that needs no other rank, C1 merges a
few statistics per token, T (in ``output_t``) does the rest. The [v, n] matrix of exponentials
exists once, in the activation dtype, in tiles of vocabulary rows. If T forms the tiles again, only
one tile exists at a time. On a CPU a tile stays in cache while it is in use. As in flash attention,
the exponentials of a tile are relative to the running maximum at the time of their computation. A
factor per token and tile corrects this wherever the tile is used. Vocabulary is the first dimension
and tokens the second, so that two of the three products read the large matrices in their memory
order.

The naive treatment is the textbook's softmax, with a barrier wherever it needs all shards: S forms
the logits, C1 takes their maximum over ranks, E forms the exponentials relative to it, C2 sums them
over ranks, T forms both gradients as in Algorithm 1, and C3 reduces the input gradient. The other
treatments are compared with this one.

Shapes and types: as in ``megatron.kernels.face``; k tiles.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from megatron.kernels.rows import local_rows, rows_of
from megatron.kernels.softmax import (
    LossOptions,
    Merged,
    ShardState,
    merge_statistics,
    row_factor,
    statistics_dtype,
)
from megatron.kernels.tiled.state import TiledState
from megatron.kernels.tiled.tiles import TileOperations

LEAST_TILES: Final = 4
"""The least number of tiles of a shard where T forms the logits again. Otherwise one tile could be
the whole shard of a GPU."""


class OutputS(TileOperations):
    """The output layer of one shard, except pass T."""

    def kept_room(self, x_nh: Tensor, rows: int) -> Sequence[Tensor]:
        """Return memory for the logits that S keeps for T in one microbatch; it is free after T.

        Args:
            x_nh: input of the output layer; only its shape, type and device count.
            rows: v.

        Returns:
            Tiles: contiguous activations [t, n], which together have v rows.
        """
        heights = tile_heights(rows, self.tile_rows)
        return [x_nh.new_empty(height, len(x_nh)) for height in heights]

    def scratch_room(self, x_nh: Tensor, rows: int, *, again: bool) -> Sequence[Tensor]:
        """Return memory for logits that are not kept; it is smaller than ``kept_room``'s.

        Args:
            x_nh: as in ``kept_room``.
            rows: v.
            again: T forms the logits again; no pass should then have all logits of a shard in
                memory.

        Returns:
            Tiles that all share the memory of the largest one.
        """
        at_most = tile_rows(rows, self.tile_rows) if again else self.tile_rows
        heights = tile_heights(rows, at_most)
        scratch = x_nh.new_empty(max(heights, default=0), len(x_nh))
        return [scratch[:height] for height in heights]

    def output_s(
        self,
        x_nh: Tensor,
        weight_vh: Tensor,
        targets_n: Tensor,
        first_row: int,
        options: LossOptions,
        room: Sequence[Tensor],
        *,
        form_gradient: bool,
        keep: bool,
    ) -> ShardState:
        """Pass S: all work of the output layer that one shard can do alone.

        Args:
            x_nh: input of the output layer.
            weight_vh: this rank's rows, without padding.
            targets_n: target ids over the whole vocabulary, int64.
            first_row: vocabulary id of ``weight_vh[0]``.
            options: form of the loss.
            room: memory from ``kept_room``, or from ``scratch_room`` if nothing is kept.
            form_gradient: also begin the input gradient (A and D), as Algorithm 2 does.
            keep: keep the exponentials for T. An evaluation needs only the statistics, and so does
                a T that forms the exponentials again.
        """
        kept = room if keep else ()
        state, target_nh = _initial_state(x_nh, weight_vh, targets_n, first_row, options, len(kept))
        state.exp_tiles = kept
        max_n, sum_n, _, logit_sum_n = state.statistics_4n
        if form_gradient:
            state.raw_gradient_nh = torch.zeros_like(x_nh, dtype=max_n.dtype)
            state.target_gradient_nh = target_gradient(state, target_nh, weight_vh, options)
        del target_nh  # needed only for D
        tiles_th = weight_vh.split([len(tile) for tile in room])
        for k, (tile_tn, tile_th) in enumerate(zip(room, tiles_th, strict=True)):
            torch.mm(tile_th, x_nh.T, out=tile_tn)
            slope_tn = soft_cap(tile_tn, options.logit_softcap)
            if options.label_smoothing:
                # Capped logits, before the exponentials take their memory.
                logit_sum_n += tile_tn.sum(0, dtype=logit_sum_n.dtype)
            shrink_n = self.exponentials_(tile_tn, max_n, sum_n)
            if keep:
                # A later tile may raise the maximum; T needs the one of this tile's exponentials.
                state.tile_max_kn[k].copy_(max_n)
            # After the sum s: the loss has no slope of the cap, only the gradients have (chain
            # rule).
            if slope_tn is not None:
                tile_tn.mul_(slope_tn)
                if options.label_smoothing and keep:
                    state.slope_tiles.append(slope_tn)
            if state.raw_gradient_nh is not None:
                self.carry_input_gradient_(state.raw_gradient_nh, shrink_n, tile_tn, tile_th)
            # Under a cap, the rows of M that label smoothing subtracts are weighted token by token.
            if state.target_gradient_nh is not None and slope_tn is not None and options.spread:
                state.target_gradient_nh.add_(slope_tn.T @ tile_th, alpha=options.spread)
        return state

    def naive_s(
        self,
        x_nh: Tensor,
        weight_vh: Tensor,
        targets_n: Tensor,
        first_row: int,
        options: LossOptions,
        room: Sequence[Tensor],
    ) -> ShardState:
        """Pass S of the naive treatment: form the logits, the targets' logits and ``maximum_n``.

        A shard without real rows has a maximum of -inf. Arguments are as in ``output_s``; ``room``
        is from ``kept_room``.
        """
        state, _ = _initial_state(x_nh, weight_vh, targets_n, first_row, options, len(room))
        state.exp_tiles = room
        max_n, cap = state.maximum_n, options.logit_softcap
        tiles_th = weight_vh.split([len(tile) for tile in room])
        for tile_tn, tile_th in zip(room, tiles_th, strict=True):
            torch.mm(tile_th, x_nh.T, out=tile_tn)
            if cap:
                tile_tn.div_(cap).tanh_().mul_(cap)
            torch.maximum(max_n, tile_tn.amax(0).to(max_n.dtype), out=max_n)
        return state

    def naive_e(self, state: ShardState, maximum_n: Tensor, options: LossOptions) -> None:
        """Pass E of the naive treatment: form exponentials relative to m, and ``sums_kn``.

        Args:
            state: the state that ``naive_s`` left; T takes it next.
            maximum_n: m, the maximum over all ranks.
            options: form of the loss.
        """
        assert isinstance(state, TiledState)
        # All tiles are relative to m itself, so T's factor exp(tile's maximum - m) is 1.
        state.tile_max_kn.copy_(maximum_n)
        max_n, sum_n, _, logit_sum_n = state.statistics_4n
        max_n.copy_(maximum_n)
        for tile_tn in state.exp_tiles:
            if options.label_smoothing:
                logit_sum_n += tile_tn.sum(0, dtype=logit_sum_n.dtype)
            slope_tn = None
            if options.logit_softcap:
                # S has capped the logits: logit / cap is the tanh, whose slope is 1 - tanh².
                slope_tn = 1 - (tile_tn / options.logit_softcap).square_()
            self.exponentials_(tile_tn, max_n, sum_n)  # no logit exceeds m, so m is not raised
            if slope_tn is not None:
                tile_tn.mul_(slope_tn)
                if options.label_smoothing:
                    state.slope_tiles.append(slope_tn)

    def merge(
        self,
        statistics_p4n: Tensor,
        state: ShardState,
        weight_vh: Tensor,
        weight_n: Tensor,
        options: LossOptions,
    ) -> tuple[Merged, Tensor | None]:
        """C1 between its two collectives: merge statistics; finish the input gradient, if begun.

        Args:
            statistics_p4n: ``statistics_4n`` of all shards.
            state: the state that S left; it still has its gradient afterwards.
            weight_vh: as in ``output_s``, and unchanged since.
            weight_n: g, the weight of each token's loss, statistics.
            options: form of the loss.

        Returns:
            Statistics over the whole vocabulary, and in Algorithm 2 this shard's part of the input
            gradient [n, h], activations.
        """
        merged = merge_statistics(statistics_p4n)
        if state.raw_gradient_nh is None:
            return merged, None
        assert isinstance(state, TiledState)
        assert state.target_gradient_nh is not None
        # ∇X_k = g (A exp(m' - m) / s - D), since A is relative to the shard's own maximum m'
        # (section 4, Algorithm 2).
        factor_n = row_factor(merged, options) * (state.maximum_n - merged.max_n).exp()
        gradient_nh = state.raw_gradient_nh * (weight_n * factor_n).unsqueeze(1)
        gradient_nh.addcmul_(state.target_gradient_nh, weight_n.unsqueeze(1), value=-1)
        # Rounded once, after the difference: C1 sends activations in their own dtype.
        return merged, gradient_nh.to(state.x_nh.dtype)


def tile_heights(rows: int, at_most: int) -> list[int]:
    """Split ``rows`` vocabulary rows into nearly equal tiles of no more than ``at_most``."""
    tiles = -(-rows // at_most)
    return [rows * (i + 1) // tiles - rows * i // tiles for i in range(tiles)]


def tile_rows(rows: int, at_most: int) -> int:
    """Return how many rows a tile has if logits are not kept.

    Args:
        rows: number of rows of the shard.
        at_most: rows that the device's kernels like to work on at a time.
    """
    return max(1, min(at_most, -(-rows // LEAST_TILES)))


def _initial_state(
    x_nh: Tensor,
    weight_vh: Tensor,
    targets_n: Tensor,
    first_row: int,
    options: LossOptions,
    tiles: int,
) -> tuple[TiledState, Tensor]:
    """Return the state before the first of k kept ``tiles``, and the targets' rows of M [n, h]."""
    dtype = statistics_dtype(x_nh.dtype)
    statistics_4n = torch.zeros((4, len(x_nh)), dtype=dtype, device=x_nh.device)
    # A shard without rows keeps -inf, and the sum 0: C1 then leaves the shard out.
    statistics_4n[0] = -torch.inf
    target_row_n, owned_n = local_rows(targets_n, first_row, len(weight_vh))
    # 0 for a target of another shard: whichever row ``local_rows`` names, D and T subtract nothing.
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
    """Return the targets' rows of M [n, h]: any row for another shard's target, 0 for empty M."""
    if not len(weight_vh):
        return weight_vh.new_zeros((len(row_n), weight_vh.shape[1]), dtype=dtype)
    return rows_of(weight_vh, row_n).to(dtype)


def soft_cap(logits: Tensor, cap: float) -> Tensor | None:
    """Cap ``logits`` in place; return the derivative, or ``None`` without a cap."""
    if not cap:
        return None
    logits.div_(cap).tanh_()
    # Between the two steps: here ``logits`` are the tanh, and d (c tanh(x / c)) / dx = 1 - tanh².
    slope = 1 - logits.square()
    logits.mul_(cap)
    return slope


def target_gradient(
    state: TiledState, target_nh: Tensor, weight_vh: Tensor, options: LossOptions
) -> Tensor:
    """Return D: the targets' weighted rows of M, and without a cap label smoothing's part.

    Args:
        state: state of the microbatch.
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
