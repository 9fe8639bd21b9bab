"""The vocabulary layers under autograd: S and C1 in the forward, T in the backward.

The output layer works as in the pipeline (``layers/vocabulary``; Algorithm 1 of arXiv 2411.05288):
S forms the exponentials of a shard and their statistics, C1 merges these over the ranks, T forms
both gradients from what S left. The weight g of a token's loss, which the pipeline knows
beforehand, is here the gradient that comes back. The sum of the input's gradient over the ranks
runs beside the product of the weight's.

Shapes: n tokens of all ranks, u those that a rank has (n, or n / P with sequence parallelism), h
hidden size, v real vocabulary rows of this rank, P ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.kernels.choose import kernels_for
from megatron.kernels.face import Kernels
from megatron.layers.vocabulary.input_layer import add_gradient_of_rows, lookup_rows
from megatron.layers.vocabulary.output_s import (
    LossOptions,
    Merged,
    ShardState,
    merge_statistics,
    output_s,
    statistics_dtype,
    tile_heights,
    token_losses,
)
from megatron.layers.vocabulary.output_t import (
    add_weight_gradient,
    input_gradient_in_t,
    subtract_target_gradient,
    tile_factors,
)
from megatron.layers.vocabulary.output_t_again import t_again, tile_rows
from megatron.layers.vocabulary.shard import VocabularyShard
from megatron.parallel.tensor import TensorParallel


@dataclass(frozen=True)
class Sharded:
    """How the ranks hold a vocabulary.

    Attributes:
        shard: the rows of this rank.
        ranks: how tokens are gathered and sums are formed.
        recompute: keep no exponentials from S to T.
    """

    shard: VocabularyShard
    ranks: TensorParallel
    recompute: bool = False

    def __deepcopy__(self, memo: object) -> "Sharded":
        """Return the same: a copied module talks over the same process group."""
        return self

    def all_tokens(self, own: Tensor) -> Tensor:
        """[u, ...] of every rank -> [n, ...]."""
        return self.ranks.gather(own.unsqueeze(0)).squeeze(0)

    def tiles(self, x_nh: Tensor, kernels: Kernels, *, keep: bool) -> Sequence[Tensor]:
        """Return buffers for the logits of ``x_nh``; they share their memory if not kept."""
        rows, at_most = self.shard.real_rows, kernels.tile_rows
        if keep:
            return [x_nh.new_empty(height, len(x_nh)) for height in tile_heights(rows, at_most)]
        heights = tile_heights(rows, tile_rows(rows, at_most))
        scratch = x_nh.new_empty(max(heights, default=0), len(x_nh))
        return [scratch[:height] for height in heights]


class TokenLosses(torch.autograd.Function):
    """The loss of every token that a rank has, in the dtype of statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        x_uh: Tensor,
        weight: Tensor,
        targets_u: Tensor,
        how: Sharded,
        options: LossOptions,
        differentiated: bool,
    ) -> Tensor:
        """Run S and C1.

        Args:
            ctx: keeps what S leaves.
            x_uh: input of the output layer.
            weight: this rank's rows, padding included.
            targets_u: target ids; one outside of the vocabulary has no target's logit.
            how: how the ranks hold the vocabulary.
            options: form of the loss.
            differentiated: whether there is a backward.
        """
        keep = differentiated and not how.recompute
        x_nh = how.all_tokens(x_uh).contiguous()
        kernels = kernels_for(x_nh.device, x_nh.dtype)
        with torch.autocast(x_nh.device.type, enabled=False):
            state = output_s(
                x_nh,
                weight.detach()[: how.shard.real_rows],
                how.all_tokens(targets_u),
                how.shard.first_row,
                options,
                how.tiles(x_nh, kernels, keep=keep),
                form_gradient=False,
                keep=keep,
                kernels=kernels,
            )
            merged = merge_statistics(how.ranks.all_gather(state.statistics_4n))
            losses_n = token_losses(merged, options)
        ctx.how, ctx.options, ctx.kernels = how, options, kernels
        if differentiated:
            _save(ctx, state, merged, x_uh, weight)
        return how.ranks.own_tokens(losses_n.unsqueeze(0)).squeeze(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_u: Tensor) -> tuple[Tensor | None, ...]:
        """Run T, with the gradient of every loss as its weight g."""
        how: Sharded = ctx.how
        state, merged, weight = _restored(ctx)
        g_n = how.all_tokens(gradient_u).contiguous()
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        with torch.autocast(g_n.device.type, enabled=False):
            backward = _recomputing if how.recompute else _keeping
            x_gradient, weight_gradient = backward(
                ctx, state, merged, weight, g_n, needs_x, needs_weight
            )
        return x_gradient, weight_gradient, None, None, None, None


def _save(ctx: Any, state: ShardState, merged: Merged, x_uh: Tensor, weight: Tensor) -> None:
    """Keep the result of S through autograd, which releases it with the rest of the graph.

    The other ranks' tokens are not kept: they are gathered again.
    """
    ctx.tiles, ctx.slopes = len(state.exp_tiles), len(state.slope_tiles)
    ctx.save_for_backward(
        x_uh,
        weight,
        state.tile_max_kn,
        state.statistics_4n,
        state.target_row_n,
        state.target_slope_n,
        merged.max_n,
        merged.sum_n,
        merged.target_n,
        merged.logit_sum_n,
        *state.exp_tiles,
        *state.slope_tiles,
    )


def _restored(ctx: Any) -> tuple[ShardState, Merged, Tensor]:
    x_uh, weight, tile_max, statistics, row, slope, *rest = ctx.saved_tensors
    merged, tiles = Merged(*rest[:4]), rest[4 : 4 + ctx.tiles]
    x_nh = ctx.how.all_tokens(x_uh).contiguous()
    slopes = rest[4 + ctx.tiles :]
    return ShardState(x_nh, tiles, slopes, tile_max, statistics, row, slope), merged, weight


def _keeping(
    ctx: Any,
    state: ShardState,
    merged: Merged,
    weight: Tensor,
    g_n: Tensor,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of this rank's input and rows, from the exponentials that S has kept."""
    how, options, kernels = ctx.how, ctx.options, ctx.kernels
    rows_vh = weight.detach()[: how.shard.real_rows]
    pending = total = None
    if needs_x:
        part_nh = input_gradient_in_t(state, rows_vh, merged, g_n, options, kernels)
        pending = how.ranks.start_reduction(part_nh.unsqueeze(0))
    if needs_weight:
        total = _zeros_for(weight)
        real = total[: how.shard.real_rows]
        subtract_target_gradient(real, state, g_n, options)
        factor_kn = tile_factors(state, merged, g_n, options)
        add_weight_gradient(real, state, factor_kn, kernels)
        total = total.to(weight.dtype)
    return None if pending is None else pending.wait().squeeze(0), total


def _recomputing(
    ctx: Any,
    state: ShardState,
    merged: Merged,
    weight: Tensor,
    g_n: Tensor,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the same from exponentials that are formed again, a tile at a time."""
    how, options, kernels = ctx.how, ctx.options, ctx.kernels
    total = _zeros_for(weight)
    part_nh = t_again(
        state,
        weight.detach()[: how.shard.real_rows],
        total[: how.shard.real_rows],
        merged,
        g_n,
        options,
        how.tiles(state.x_nh, kernels, keep=False),
        form_gradient=needs_x,
        kernels=kernels,
    )
    x_gradient = None if part_nh is None else how.ranks.reduce(part_nh.unsqueeze(0)).squeeze(0)
    return x_gradient, total.to(weight.dtype) if needs_weight else None


def _zeros_for(weight: Tensor) -> Tensor:
    """Return a buffer for the gradient of ``weight``, in which the products add up."""
    return torch.zeros_like(weight, dtype=statistics_dtype(weight.dtype))


class Embeddings(torch.autograd.Function):
    """The embeddings [u, h] of the tokens that a rank has: the sum over the shards (IF, IB)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens_u: Tensor, how: Sharded) -> Tensor:
        """Look all ranks' tokens up in this rank's rows, and add the ranks up."""
        ctx.how = how
        tokens_n = how.all_tokens(tokens_u)
        ctx.save_for_backward(weight, tokens_n)
        part_nh = lookup_rows(weight, tokens_n, how.shard)
        return how.ranks.reduce(part_nh.unsqueeze(0)).squeeze(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_uh: Tensor) -> tuple[Tensor | None, ...]:
        """Add the gradients of the tokens whose rows are here."""
        weight, tokens_n = ctx.saved_tensors
        total = _zeros_for(weight)
        gradient_nh = ctx.how.all_tokens(gradient_uh.contiguous())
        add_gradient_of_rows(total, tokens_n, gradient_nh, ctx.how.shard)
        return total.to(weight.dtype), None, None


class SumOverRanks(torch.autograd.Function):
    """The sum of a number over ranks that each go on with it, and so have its whole gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: TensorParallel) -> Tensor:
        """Return the sum, the same on every rank."""
        return ranks.all_gather(own).sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Hand the gradient on: every rank has the same."""
        return gradient, None
