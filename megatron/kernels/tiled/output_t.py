"""The output layer after its barrier, pass T (arXiv 2411.05288, section 4).

The statistics of the whole vocabulary give a factor per token and tile. This factor turns the
exponentials that S left into the gradient of the logits. It scales the rows of H and of the
products, never the [v, n] matrix.

Where S has kept no exponentials, T forms the logits again, a tile at a time. Then only a few
numbers per token are kept between S and T, and no pass has all logits of a shard in memory. The
price is one more product. The maximum over all shards is known by now, so all exponentials are
relative to it at once, and tiles need no factors of their own. Both gradients take their part from
a tile while it is in memory.

Shapes and types: as in ``megatron.kernels.face``; k tiles.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from megatron.kernels.softmax import LossOptions, Merged, ShardState, row_factor
from megatron.kernels.tiled.output_s import OutputS, soft_cap, target_gradient, target_rows
from megatron.kernels.tiled.state import TiledState


class TiledOutput(OutputS):
    """The output layer of one shard, worked on in tiles of vocabulary rows."""

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
        """Pass T: add the weight gradient to ``gradient_vh``.

        Args:
            state: the state that S or E left.
            weight_vh: as in ``output_s``, and unchanged since.
            gradient_vh: sum of the weight gradients of these rows, statistics; ``None``: no weight
                gradient is formed.
            merged: statistics over the whole vocabulary.
            weight_n: g, the weight of each token's loss, statistics.
            options: form of the loss.
            room: memory from ``scratch_room`` to form the exponentials again; ``None``: the state
                has them.
            form_gradient: also form this shard's part of the input gradient, as Algorithm 1 does.
            begins: the sum begins with this microbatch, and the old content of ``gradient_vh`` is
                ignored.

        Returns:
            The input gradient [n, h], activations, or ``None`` without ``form_gradient``.
        """
        assert isinstance(state, TiledState)
        gradient_nh = None
        if form_gradient:
            gradient_nh = _targets_input_gradient(state, weight_vh, weight_n, options)
        if gradient_vh is not None:
            if begins:
                gradient_vh.zero_()  # the targets' part is subtracted before any product
            _subtract_target_gradient(gradient_vh, state, weight_n, options)
        gradients = gradient_vh, gradient_nh
        if room is None:
            self._add_kept_tiles(gradients, state, weight_vh, merged, weight_n, options)
        else:
            self._add_tiles_again(gradients, state, weight_vh, merged, weight_n, options, room)
        # Rounded once, after the targets' part: C2 sends activations in their own dtype.
        return None if gradient_nh is None else gradient_nh.to(state.x_nh.dtype)

    def _add_kept_tiles(
        self,
        gradients: tuple[Tensor | None, Tensor | None],
        state: TiledState,
        weight_vh: Tensor,
        merged: Merged,
        weight_n: Tensor,
        options: LossOptions,
    ) -> None:
        """Add the softmax part of the gradients of weight and input, from the state's tiles."""
        gradient_vh, gradient_nh = gradients
        scale_n = weight_n * row_factor(merged, options)
        # g exp(m' - m) / s, where m' is the running maximum that the tile was formed with.
        factor_kn = (state.tile_max_kn - merged.max_n).exp() * scale_n
        tiles = _with_rows(state.exp_tiles)
        for (rows, tile_tn), factor_n in zip(tiles, factor_kn, strict=True):
            if gradient_nh is not None:
                self.add_input_gradient_(gradient_nh, factor_n, tile_tn, weight_vh[rows])
            if gradient_vh is not None:
                self.add_weight_gradient_(gradient_vh[rows], factor_n, tile_tn, state.x_nh)
        if gradient_nh is not None:
            for rows, slope_tn in _with_rows(state.slope_tiles):
                _subtract_spread_from_input(
                    gradient_nh, slope_tn, weight_vh[rows], weight_n, options
                )

    def _add_tiles_again(
        self,
        gradients: tuple[Tensor | None, Tensor | None],
        state: TiledState,
        weight_vh: Tensor,
        merged: Merged,
        weight_n: Tensor,
        options: LossOptions,
        room: Sequence[Tensor],
    ) -> None:
        """Form the tiles again in ``room``, and add their part of the gradients."""
        gradient_vh, gradient_nh = gradients
        x_nh, factor_n = state.x_nh, weight_n * row_factor(merged, options)
        scaled_nh = torch.mul(x_nh, factor_n.unsqueeze(1), out=torch.empty_like(x_nh))
        for rows, tile_tn in _with_rows(room):
            tile_th = weight_vh[rows]
            torch.mm(tile_th, x_nh.T, out=tile_tn)
            slope_tn = soft_cap(tile_tn, options.logit_softcap)
            self.shifted_exponentials_(tile_tn, merged.max_n)
            if slope_tn is not None:
                tile_tn.mul_(slope_tn)
            spreads = slope_tn if options.label_smoothing else None
            if gradient_vh is not None:
                self.accumulate_product_(gradient_vh[rows], tile_tn, scaled_nh)
                if spreads is not None:
                    weighted_nh = x_nh * weight_n.unsqueeze(1)
                    _subtract_spread(gradient_vh[rows], spreads, weighted_nh, options)
            if gradient_nh is not None:
                self.add_input_gradient_(gradient_nh, factor_n, tile_tn, tile_th)
                if spreads is not None:
                    _subtract_spread_from_input(gradient_nh, spreads, tile_th, weight_n, options)


def _with_rows(tiles: Sequence[Tensor]) -> list[tuple[slice, Tensor]]:
    """Return every tile with its rows of the shard."""
    ends = list(accumulate(map(len, tiles), initial=0))
    return [(slice(*rows), tile) for rows, tile in zip(pairwise(ends), tiles, strict=True)]


def _targets_input_gradient(
    state: TiledState, weight_vh: Tensor, weight_n: Tensor, options: LossOptions
) -> Tensor:
    """Return the part of the input gradient that the targets subtract, -g D, [n, h]."""
    target_nh = target_rows(weight_vh, state.target_row_n, weight_n.dtype)
    gradient_nh = target_gradient(state, target_nh, weight_vh, options)
    return gradient_nh.mul_(-weight_n.unsqueeze(1))


def _subtract_spread_from_input(
    gradient_nh: Tensor, slope_tn: Tensor, tile_th: Tensor, weight_n: Tensor, options: LossOptions
) -> None:
    """Subtract a tile's part of label smoothing from the input gradient of capped logits."""
    gradient_nh -= (options.spread * weight_n).unsqueeze(1) * (slope_tn.T @ tile_th)


def _subtract_target_gradient(
    gradient_vh: Tensor, state: TiledState, weight_n: Tensor, options: LossOptions
) -> None:
    """Subtract the parts of the targets and of label smoothing from the weight gradient."""
    if not len(gradient_vh):
        return
    pull_n = weight_n * ((1 - options.label_smoothing) * state.target_slope_n)
    pulled_nh = (state.x_nh * pull_n.unsqueeze(1)).to(gradient_vh.dtype)
    # Tokens may share a target: an indexed ``-=`` would subtract only one of them.
    gradient_vh.index_add_(0, state.target_row_n, pulled_nh, alpha=-1)
    if not options.label_smoothing:
        return
    weighted_nh = state.x_nh * weight_n.unsqueeze(1)
    if not options.logit_softcap:
        # Without a cap all rows have the slope 1, so each loses the same vector, spread Σ g H.
        gradient_vh -= options.spread * weighted_nh.sum(0)
    for rows, slope_tn in _with_rows(state.slope_tiles):
        _subtract_spread(gradient_vh[rows], slope_tn, weighted_nh, options)


def _subtract_spread(
    gradient_th: Tensor, slope_tn: Tensor, weighted_nh: Tensor, options: LossOptions
) -> None:
    """Subtract a tile's part of label smoothing from the weight gradient of capped logits.

    Args:
        gradient_th: weight gradient of the tile's rows.
        slope_tn: derivative of the soft-capping.
        weighted_nh: g H.
        options: form of the loss.
    """
    gradient_th -= slope_tn @ (options.spread * weighted_nh).to(slope_tn.dtype)
