"""The output layer of one shard on a GPU: the passes S, E and T, and the arithmetic of C1.

The logits of all the shard's rows are one matrix [v, n], [vocabulary, tokens]. One product writes
it. Then it is read once for its columns' maxima, turned into exponentials in place, and read by the
other products. The maxima are known before the first exponential, so no running maximum is needed.
C1 and T subtract the targets' part, straight from the output matrix M and the layer's input H.

Where logits are not kept, tiles of the matrix go through the same steps one after the other, all in
the memory of one tile. In T the maxima are known, so a tile is some rows with all tokens: every row
of the weight gradient, by far the largest sum, is touched once. In S such a tile may raise the
maxima, so what earlier tiles have summed shrinks. To shrink A, which is a sum over rows [n, h],
costs more than to read M for each of a few slices of the tokens; then a tile is some tokens with
all rows.

Shapes: n tokens, h hidden size, v rows of the shard without padding, k spans of rows; for a tile
r rows, t tokens.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.kernels.cuda import gradients, logit_operators
from megatron.kernels.cuda.gradients import (
    CudaState,
    begin_gradient,
    initial_state,
    relative_to_all,
)
from megatron.kernels.cuda.products import Products
from megatron.kernels.cuda.sizes import tile_rows
from megatron.kernels.cuda.tiles import Tile, tiles, whole
from megatron.kernels.softmax import LossOptions, Merged, ShardState


class CudaOutput:
    """The part of ``Kernels`` about the output layer.

    Args:
        products: matrix products of the device.
    """

    def __init__(self, products: Products) -> None:
        self._products = products

    def kept_room(self, x_nh: Tensor, rows: int) -> Sequence[Tensor]:
        """See ``Kernels``: one [v, n]."""
        return [x_nh.new_empty(rows, len(x_nh))]

    def scratch_room(self, x_nh: Tensor, rows: int, *, again: bool) -> Sequence[Tensor]:
        """See ``Kernels``: one [rows of a tile, n]."""
        return [x_nh.new_empty(tile_rows(rows, again=again), len(x_nh))]

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
        """See ``Kernels``."""
        state = initial_state(x_nh, targets_n, first_row)
        [room_rn] = room  # r is v where logits are kept
        if keep:
            state.exp_tiles = (room_rn,)
        capped_spread = bool(options.spread and options.logit_softcap)
        if form_gradient:
            begin_gradient(state, weight_vh, options)
        if not len(weight_vh):
            return state
        if not keep and not form_gradient:
            self._statistics_alone(state, weight_vh, room_rn, options)
            return state
        for tile, logits_rt in tiles(room_rn, len(weight_vh), len(x_nh), by_tokens=True):
            shrink_t = self._logits_and_maxima(state, weight_vh, logits_rt, tile, options)
            slopes_rt = torch.empty_like(logits_rt) if capped_spread else None
            self._exponentials(state, logits_rt, tile, options, slopes_rt, shrink_t)
            if keep:
                state.slopes_vn = slopes_rt
            if form_gradient:
                self._form_gradient(state, weight_vh, logits_rt, slopes_rt, tile, shrink_t)
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
        """See ``Kernels``; the logits are not capped yet."""
        state = initial_state(x_nh, targets_n, first_row)
        [logits_vn] = state.exp_tiles = tuple(room)
        if len(weight_vh):
            self._logits_and_maxima(state, weight_vh, logits_vn, whole(logits_vn), options)
        return state

    def naive_e(self, state: ShardState, maximum_n: Tensor, options: LossOptions) -> None:
        """See ``Kernels``."""
        assert isinstance(state, CudaState)
        [logits_vn] = state.exp_tiles
        state.maximum_n.copy_(maximum_n)
        if not len(logits_vn):
            return
        if options.spread and options.logit_softcap:
            state.slopes_vn = torch.empty_like(logits_vn)
        self._exponentials(state, logits_vn, whole(logits_vn), options, state.slopes_vn)

    def merge(
        self,
        statistics_p4n: Tensor,
        state: ShardState,
        weight_vh: Tensor,
        weight_n: Tensor,
        options: LossOptions,
    ) -> tuple[Merged, Tensor | None]:
        """See ``Kernels``; it is one kernel."""
        assert isinstance(state, CudaState)
        return gradients.merge(statistics_p4n, state, weight_vh, weight_n, options)

    def output_t(
        self,
        state: ShardState,
        weight_vh: Tensor,
        gradient_vh: Tensor | None,
        merged: Merged,
        weight_n: Tensor,
        options: LossOptions,
        room: Sequence[Tensor] | None,
        *,
        form_gradient: bool,
        begins: bool = False,
    ) -> Tensor | None:
        """See ``Kernels``."""
        assert isinstance(state, CudaState)
        if room is not None:
            state = relative_to_all(state, merged)
        if form_gradient:
            begin_gradient(state, weight_vh, options)
        scaled_nh, pulled_nh = state.x_nh, None
        if gradient_vh is not None and len(weight_vh):
            scaled_nh = gradients.scaled_input(state, merged, weight_n, options)
            pulled_nh = _pulled(state, weight_n, options)
        for tile, exp_rn, slopes_rn in self._exponentials_of(state, weight_vh, options, room):
            if gradient_vh is not None:
                total_rh = gradient_vh[tile.rows]
                self._products.accumulate_(total_rh, exp_rn, scaled_nh, begins=begins)
                if slopes_rn is not None and pulled_nh is not None:
                    self._products.accumulate_(total_rh, slopes_rn, pulled_nh)  # begun just above
            if form_gradient:
                self._form_gradient(state, weight_vh, exp_rn, slopes_rn, tile)
        if gradient_vh is not None and len(weight_vh):  # last: a first product overwrites the sum
            gradients.subtract_targets(gradient_vh, state, weight_n, options)
        if not form_gradient:
            return None
        return gradients.input_gradient(state, merged, weight_vh, weight_n, options)

    def _statistics_alone(
        self, state: CudaState, weight_vh: Tensor, room_rn: Tensor, options: LossOptions
    ) -> None:
        """Set the state's statistics; nothing else needs the logits or the exponentials."""
        maximum_n, sum_n, target_logits_n, logit_sum_n = state.statistics_4n
        cut = list(tiles(room_rn, len(weight_vh), len(sum_n), by_tokens=False))
        spans = [logit_operators.spans(len(logits_rn)) for _, logits_rn in cut]
        partial_3kn = sum_n.new_empty(3 if options.spread else 2, sum(spans), len(sum_n))
        of_tiles = (part.split(spans) for part in partial_3kn)
        for (tile, logits_rn), *partial in zip(cut, *of_tiles, strict=True):
            torch.mm(weight_vh[tile.rows], state.x_nh.T, out=logits_rn)
            maxima_kn, sums_kn, *logit_sums_kn = partial
            logit_operators.column_statistics(
                logits_rn,
                state.targets_n,
                maxima_kn,
                sums_kn,
                logit_sums_kn[0] if logit_sums_kn else None,
                target_logits_n,
                state.first_row + tile.rows.start,
                options.logit_softcap,
            )
        maxima_kn, sums_kn, *logit_sums_kn = partial_3kn
        torch.amax(maxima_kn, 0, out=maximum_n)
        torch.sum(sums_kn.mul_(maxima_kn.sub_(maximum_n).exp_()), 0, out=sum_n)  # Σ s' exp(m' - m)
        if logit_sums_kn:
            torch.sum(logit_sums_kn[0], 0, out=logit_sum_n)

    def _logits_and_maxima(
        self,
        state: CudaState,
        weight_vh: Tensor,
        logits_rt: Tensor,
        tile: Tile,
        options: LossOptions,
    ) -> Tensor | None:
        """Fill ``logits_rt``, raise the state's maxima to the tile's, and set targets' logits.

        Returns:
            [t], the factor by which sums over earlier rows shrink; ``None``: there are none.
        """
        torch.mm(weight_vh[tile.rows], state.x_nh[tile.tokens].T, out=logits_rt)
        maximum_t, target_logits_t = (state.statistics_4n[row][tile.tokens] for row in (0, 2))
        maxima_kt = maximum_t.new_empty(logit_operators.spans(len(logits_rt)), len(maximum_t))
        logit_operators.column_maxima(
            logits_rt,
            state.targets_n[tile.tokens],
            maxima_kt,
            target_logits_t,
            state.first_row + tile.rows.start,
            options.logit_softcap,
        )
        if tile.begins:
            torch.amax(maxima_kt, 0, out=maximum_t)
            return None
        before_t = maximum_t.clone()
        torch.maximum(before_t, maxima_kt.amax(0), out=maximum_t)
        return before_t.sub_(maximum_t).exp_()

    def _exponentials(
        self,
        state: CudaState,
        logits_rt: Tensor,
        tile: Tile,
        options: LossOptions,
        slopes_rt: Tensor | None,
        shrink_t: Tensor | None = None,
    ) -> None:
        """Turn logits into exponentials relative to the state's maximum, and add them up."""
        maximum_t, sum_t, _, logit_sum_t = state.statistics_4n[:, tile.tokens]
        sums_kt = sum_t.new_empty(logit_operators.spans(len(logits_rt)), len(sum_t))
        logit_sums_kt = torch.empty_like(sums_kt) if options.spread else None
        logit_operators.exponentials_(
            logits_rt, maximum_t, sums_kt, logit_sums_kt, slopes_rt, options.logit_softcap
        )
        if shrink_t is None:
            torch.sum(sums_kt, 0, out=sum_t)
        else:
            sum_t.mul_(shrink_t).add_(sums_kt.sum(0))  # this tile has the new maximum
        if logit_sums_kt is not None:
            logit_sum_t.add_(logit_sums_kt.sum(0))

    def _form_gradient(
        self,
        state: CudaState,
        weight_vh: Tensor,
        exp_rt: Tensor,
        slopes_rt: Tensor | None,
        tile: Tile,
        shrink_t: Tensor | None = None,
    ) -> None:
        """Add a tile to A, and to ``spread_nh`` if label smoothing meets capped logits."""
        assert state.raw_gradient_nh is not None
        raw_th, weight_rh = state.raw_gradient_nh[tile.tokens], weight_vh[tile.rows]
        if shrink_t is not None:
            raw_th.mul_(shrink_t.unsqueeze(1))  # A so far is relative to the old maximum
        self._products.accumulate_(raw_th, exp_rt.T, weight_rh, begins=tile.begins)
        if slopes_rt is not None and state.spread_nh is not None:
            spread_th = state.spread_nh[tile.tokens]
            self._products.accumulate_(spread_th, slopes_rt.T, weight_rh, begins=tile.begins)

    def _exponentials_of(
        self,
        state: CudaState,
        weight_vh: Tensor,
        options: LossOptions,
        room: Sequence[Tensor] | None,
    ) -> Iterator[tuple[Tile, Tensor, Tensor | None]]:
        """Yield tiles of rows, exponentials relative to the state's maximum, and slopes."""
        if not len(weight_vh):
            return
        if room is None:
            [exp_vn] = state.exp_tiles
            yield whole(exp_vn), exp_vn, state.slopes_vn
            return
        [room_rn] = room
        rows, tokens = len(weight_vh), len(state.x_nh)
        for tile, exp_rn in tiles(room_rn, rows, tokens, by_tokens=False):
            torch.mm(weight_vh[tile.rows], state.x_nh.T, out=exp_rn)
            slopes_rn = None
            if options.spread and options.logit_softcap:
                slopes_rn = torch.empty_like(exp_rn)
            logit_operators.exponentials_(
                exp_rn, state.maximum_n, None, None, slopes_rn, options.logit_softcap
            )
            yield tile, exp_rn, slopes_rn


def _pulled(state: CudaState, weight_n: Tensor, options: LossOptions) -> Tensor | None:
    """Return [n, h], whose product with slopes label smoothing adds to the weight gradient."""
    if not (options.spread and options.logit_softcap):
        return None
    pulled_nh = (-options.spread * weight_n).unsqueeze(1) * state.x_nh
    return pulled_nh.to(state.x_nh.dtype)
