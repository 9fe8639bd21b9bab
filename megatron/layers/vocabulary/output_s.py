"""The output layer up to its barrier, pass S, as pure functions (arXiv 2411.05288, section 4).

Every rank holds a shard of the vocabulary. S does all work that needs no other rank, C1 merges a
few statistics per token, T (in ``output_t``) does the rest. The [v, n] matrix of exponentials
exists once, in the activation dtype, in tiles of vocabulary rows. On a CPU a tile stays in cache
while it is in use. As in flash attention, each tile is relative to the running maximum at the time
it was computed; a factor per token and tile corrects this wherever the tile is used. Vocabulary is
the first dimension and tokens the second, so that two of the three products read the large matrices
in their memory order.

Shapes: n tokens (sequence x batch), h hidden size, v rows of this rank's shard without padding,
t rows of one tile, k tiles, p shards. Statistics are fp32 (float64 for float64 activations).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kernels.face import Kernels
from megatron.layers.vocabulary.shard import local_rows, rows_of
from megatron.parallel.lanes import keep_until_used


@dataclass(frozen=True)
class LossOptions:
    """Options of a token's loss beyond plain cross-entropy.

    With lse the log-sum-exp over the real vocabulary, y the target's logit and l all logits:
    ``loss = lse - (1 - smoothing) y - smoothing / V sum(l) + z_loss_coeff lse^2``.

    Attributes:
        vocab_size: real vocabulary entries V.
        label_smoothing: share of the target mass spread evenly over the real vocabulary.
        z_loss_coeff: weight of the squared log-partition.
        logit_softcap: logits become ``c tanh(logit / c)``; 0 leaves them as they are.
    """

    vocab_size: int
    label_smoothing: float = 0.0
    z_loss_coeff: float = 0.0
    logit_softcap: float = 0.0

    @property
    def spread(self) -> float:
        """Target mass that every real vocabulary entry gets by label smoothing."""
        return self.label_smoothing / self.vocab_size


class HasStatistics:
    """Names the rows of ``statistics_4n`` that the naive treatment sends separately.

    Attributes:
        statistics_4n: local maximum m', sum s', target logit y', sum of logits.
    """

    statistics_4n: Tensor

    @property
    def maximum_n(self) -> Tensor:
        """This shard's maximum, of which C1 takes the maximum over ranks in the naive treatment."""
        return self.statistics_4n[0]

    @property
    def sums_kn(self) -> Tensor:
        """The terms of C2's sum over ranks in the naive treatment, [3, n]: s', y', logit sum."""
        return self.statistics_4n[1:]


@dataclass
class ShardState(HasStatistics):
    """The state that S leaves for T on one rank, for one microbatch.

    Attributes:
        x_nh: input of the output layer.
        exp_tiles: for each tile [t, n], the exponentials relative to the tile's maximum in
            ``tile_max_kn``, times the derivative of the soft-capping if there is one. None in an
            evaluation.
        slope_tiles: for each tile [t, n], this derivative; kept only if label smoothing needs it.
        tile_max_kn: for each tile, the running maximum at the time it was computed.
        statistics_4n: local maximum m', sum s', target logit y' (0 elsewhere), sum of logits.
        target_row_n: row of the target in this shard; any row if another shard has the target.
        target_slope_n: derivative of the soft-capping at the target (1 without soft-capping); 0 if
            another shard has the target.
        raw_gradient_nh: A = E W relative to m' (Algorithm 2 only).
        target_gradient_nh: D = G W, the part that the targets subtract (Algorithm 2 only).
    """

    x_nh: Tensor
    exp_tiles: Sequence[Tensor]
    slope_tiles: list[Tensor]
    tile_max_kn: Tensor
    statistics_4n: Tensor
    target_row_n: Tensor
    target_slope_n: Tensor
    raw_gradient_nh: Tensor | None = None
    target_gradient_nh: Tensor | None = None

    def drop_gradient(self) -> None:
        """Release A and D; pending work of the current stream may still read them."""
        for tensor in (self.raw_gradient_nh, self.target_gradient_nh):
            if tensor is not None:
                keep_until_used(tensor)
        self.raw_gradient_nh = self.target_gradient_nh = None


@dataclass(frozen=True)
class Merged:
    """Statistics over the whole vocabulary, the same on every rank after C1.

    Attributes:
        max_n: m, the maximum.
        sum_n: s, the sum of exponentials relative to m.
        target_n: y, the target's logit.
        logit_sum_n: the sum of all logits.
    """

    max_n: Tensor
    sum_n: Tensor
    target_n: Tensor
    logit_sum_n: Tensor

    @property
    def lse_n(self) -> Tensor:
        """Log-sum-exp of every token."""
        return self.max_n + self.sum_n.log()


def statistics_dtype(activation: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics and accumulators: at least fp32."""
    return torch.promote_types(activation, torch.float32)


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
    t_follows: bool = True,
    kernels: Kernels,
) -> ShardState:
    """Pass S: all work of the output layer that one shard can do alone.

    Args:
        x_nh: input of the output layer.
        weight_vh: this rank's rows, without padding.
        targets_n: target ids over the whole vocabulary, int64.
        first_row: vocabulary id of ``weight_vh[0]``.
        options: form of the loss.
        exp_tiles: contiguous [t, n] buffers, their heights summing to v, that receive the
            exponentials. For evaluation they may share their memory.
        form_gradient: also form A and D, as Algorithm 2 does.
        t_follows: keep the inputs of T; an evaluation needs only the statistics.
        kernels: of the device and type of ``x_nh``.
    """
    state, target_nh = initial_state(x_nh, weight_vh, targets_n, first_row, options, len(exp_tiles))
    if t_follows:
        state.exp_tiles = exp_tiles
    max_n, sum_n, _, logit_sum_n = state.statistics_4n
    if form_gradient:
        state.raw_gradient_nh = torch.zeros_like(x_nh, dtype=max_n.dtype)
        state.target_gradient_nh = target_gradient(state, target_nh, weight_vh, options)
    del target_nh  # needed only for D
    tiles_th = weight_vh.split([len(tile) for tile in exp_tiles])
    for tile_tn, tile_th, tile_max_n in zip(exp_tiles, tiles_th, state.tile_max_kn, strict=True):
        torch.mm(tile_th, x_nh.T, out=tile_tn)
        slope_tn = soft_cap(tile_tn, options.logit_softcap)
        if options.label_smoothing:
            logit_sum_n += tile_tn.sum(0, dtype=logit_sum_n.dtype)
        shrink_n = kernels.exponentials_(tile_tn, max_n, sum_n)
        tile_max_n.copy_(max_n)
        if slope_tn is not None:
            tile_tn.mul_(slope_tn)
            if options.label_smoothing and t_follows:
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
) -> tuple[ShardState, Tensor]:
    """Return the state before the first of k ``tiles``, and the targets' rows of W [n, h]."""
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
    state = ShardState(x_nh, (), [], tile_max_kn, statistics_4n, target_row_n, slope_n)
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
    state: ShardState, target_nh: Tensor, weight_vh: Tensor, options: LossOptions
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


def merge_statistics(statistics_p4n: Tensor) -> Merged:
    """Merge the gathered statistics of all shards by log-sum-exp (the arithmetic of C1).

    Args:
        statistics_p4n: ``ShardState.statistics_4n`` of every rank.
    """
    return Merged(*_merged(statistics_p4n))


def merge_some_statistics(statistics_t4n: Tensor) -> Tensor:
    """Merge the statistics of some shards as ``merge_statistics`` does.

    Returns:
        Statistics of the same form [4, n], as if those shards were one.
    """
    return torch.stack(_merged(statistics_t4n))


def _merged(statistics_p4n: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    local_max_pn, local_sum_pn = statistics_p4n[:, 0], statistics_p4n[:, 1]
    max_n = local_max_pn.amax(0)
    # Shards that are all padding have a maximum of -inf, and so have some of them together.
    finite_n = max_n.clamp_min(torch.finfo(max_n.dtype).min)
    sum_n = (local_sum_pn * (local_max_pn - finite_n).exp()).sum(0)
    return max_n, sum_n, statistics_p4n[:, 2].sum(0), statistics_p4n[:, 3].sum(0)


def token_losses(merged: Merged, options: LossOptions) -> Tensor:
    """Return the loss of every token [n], before its weight g."""
    lse_n = merged.lse_n
    loss_n = lse_n - (1 - options.label_smoothing) * merged.target_n
    if options.label_smoothing:
        loss_n = loss_n - options.spread * merged.logit_sum_n
    if options.z_loss_coeff:
        loss_n = loss_n + options.z_loss_coeff * lse_n.square()
    return loss_n


def row_factor(merged: Merged, options: LossOptions) -> Tensor:
    """Return [n], the factor from an exponential relative to m to its part of the gradient."""
    factor_n = 1 / merged.sum_n
    if options.z_loss_coeff:
        factor_n = factor_n * (1 + 2 * options.z_loss_coeff * merged.lse_n)
    return factor_n


def input_gradient_from_s(
    state: ShardState, merged: Merged, weight_n: Tensor, options: LossOptions
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
