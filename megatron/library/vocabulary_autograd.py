"""The vocabulary layers under autograd: S and C1 in the forward, T in the backward.

The output layer works as in the pipeline (``layers/vocabulary``; Algorithm 1 of arXiv 2411.05288).
S forms the exponentials of a shard and their statistics. C1 merges the statistics over the ranks. T
forms both gradients from the tensors that S has kept. Each token's loss has a weight g. The
pipeline knows g beforehand; here g is the gradient that autograd hands to the backward. The input's
gradient is summed over the ranks while the weight's gradient is computed.

Shapes: n tokens of all ranks, u tokens of one rank (n, or n / P with sequence parallelism), h
hidden size, v real vocabulary rows of this rank, P ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.kernels.choose import kernels_for
from megatron.kernels.softmax import (
    LossOptions,
    Merged,
    ShardState,
    merge_statistics,
    statistics_dtype,
    token_losses,
)
from megatron.layers.vocabulary.input_layer import lookup_rows
from megatron.layers.vocabulary.shard import VocabularyShard
from megatron.parallel.lanes import Pending
from megatron.parallel.tensor import TensorParallel


@dataclass(frozen=True)
class Sharded:
    """How the ranks hold a vocabulary.

    Attributes:
        shard: the rows of this rank.
        ranks: the ranks of the vocabulary; it gathers tokens and forms sums over them.
        recompute: keep no exponentials from S to T, which forms them again.
    """

    shard: VocabularyShard
    ranks: TensorParallel
    recompute: bool = False

    def __deepcopy__(self, memo: object) -> "Sharded":
        """Return this object itself: a copied module uses the same process group."""
        return self

    def all_tokens(self, own: Tensor) -> Tensor:
        """Gather [u, ...] of every rank into [n, ...]."""
        return self.ranks.gather(own.unsqueeze(0)).squeeze(0)


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

        For a target outside of the vocabulary, no rank has a target's logit. ``differentiated``
        says that a backward follows.
        """
        keep = differentiated and not how.recompute
        x_nh = how.all_tokens(x_uh).contiguous()
        kernels = kernels_for(x_nh.device, x_nh.dtype)
        with torch.autocast(x_nh.device.type, enabled=False):
            room = kernels.scratch_room(x_nh, how.shard.real_rows, again=how.recompute)
            if keep:
                room = kernels.kept_room(x_nh, how.shard.real_rows)
            state = kernels.output_s(
                x_nh,
                weight.detach()[: how.shard.real_rows],
                how.all_tokens(targets_u),
                how.shard.first_row,
                options,
                room,
                form_gradient=False,
                keep=keep,
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
        total = _zeros_for(weight) if needs_weight else None
        work = partial(_t, ctx, state, weight, merged, g_n)
        with torch.autocast(g_n.device.type, enabled=False):
            if how.recompute:  # one call forms the logits again, for both gradients
                pending = work(total, form_gradient=needs_x)
            else:
                pending = work(None, form_gradient=True) if needs_x else None
                if total is not None:
                    work(total, form_gradient=False)
        x_gradient = None if pending is None else pending.wait().squeeze(0)
        weight_gradient = None if total is None else total.to(weight.dtype)
        return x_gradient, weight_gradient, None, None, None, None


def _t(
    ctx: Any,
    state: ShardState,
    weight: Tensor,
    merged: Merged,
    g_n: Tensor,
    total: Tensor | None,
    *,
    form_gradient: bool,
) -> Pending[Tensor] | None:
    """Run T: add the weight's gradient to ``total``, and start to sum the input's over the ranks.

    Without ``total`` the weight's gradient is left out, without ``form_gradient`` the input's.
    """
    how, rows, kernels = ctx.how, ctx.how.shard.real_rows, ctx.kernels
    part_nh = kernels.output_t(
        state,
        weight.detach()[:rows],
        None if total is None else total[:rows],
        merged,
        g_n,
        ctx.options,
        kernels.scratch_room(state.x_nh, rows, again=True) if how.recompute else None,
        form_gradient=form_gradient,
    )
    started: Pending[Tensor] | None = None
    if part_nh is not None:
        started = how.ranks.start_reduction(part_nh.unsqueeze(0))
    return started


def _save(ctx: Any, state: ShardState, merged: Merged, x_uh: Tensor, weight: Tensor) -> None:
    """Hand the result of S to autograd, which releases it together with the rest of the graph.

    Only this rank's tokens are kept: the backward gathers the other ranks' tokens again.
    """
    kept, ctx.put_together = _taken_apart(replace(state, x_nh=x_uh))
    numbers = merged.max_n, merged.sum_n, merged.target_n, merged.logit_sum_n
    ctx.save_for_backward(weight, *numbers, *kept)


def _restored(ctx: Any) -> tuple[ShardState, Merged, Tensor]:
    weight, *kept = ctx.saved_tensors
    state = ctx.put_together(kept[4:])
    x_nh = ctx.how.all_tokens(state.x_nh).contiguous()
    return replace(state, x_nh=x_nh), Merged(*kept[:4]), weight


def _taken_apart(
    state: ShardState,
) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], ShardState]]:
    """Return the tensors of a state, and a function that makes the state from them again.

    Each kind of kernels has its own class of state.
    """
    kind, tensors = type(state), list[Tensor]()
    places: dict[str, int | slice] = {}
    others: dict[str, Any] = {}
    for field in fields(state):
        value, begin = getattr(state, field.name), len(tensors)
        if isinstance(value, Tensor):
            tensors.append(value)
            places[field.name] = begin
        elif isinstance(value, Sequence):
            tensors += value
            places[field.name] = slice(begin, len(tensors))
        else:
            others[field.name] = value

    def put_together(kept: Sequence[Tensor]) -> ShardState:
        again: dict[str, Any] = {name: kept[place] for name, place in places.items()}
        return kind(**again, **others)

    return tensors, put_together


def _zeros_for(weight: Tensor) -> Tensor:
    """Return a buffer in which the products of the gradient of ``weight`` add up."""
    return torch.zeros_like(weight, dtype=statistics_dtype(weight.dtype))


class Embeddings(torch.autograd.Function):
    """The embeddings [u, h] of a rank's tokens: the sum of the shards' lookups (IF, IB)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens_u: Tensor, how: Sharded) -> Tensor:
        """Look up the tokens of all ranks in this rank's rows, and sum over the ranks."""
        ctx.how = how
        tokens_n = how.all_tokens(tokens_u)
        ctx.save_for_backward(weight, tokens_n)
        part_nh = lookup_rows(weight, tokens_n, how.shard)
        return how.ranks.reduce(part_nh.unsqueeze(0)).squeeze(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_uh: Tensor) -> tuple[Tensor | None, ...]:
        """Form the gradient of this rank's rows, from the tokens that looked them up."""
        weight, tokens_n = ctx.saved_tensors
        total = _zeros_for(weight)
        gradient_nh = ctx.how.all_tokens(gradient_uh.contiguous())
        kernels = kernels_for(total.device, weight.dtype)
        kernels.add_rows_(total, tokens_n, gradient_nh, ctx.how.shard.first_row)
        return total.to(weight.dtype), None, None


class SumOverRanks(torch.autograd.Function):
    """The sum of a number over ranks.

    Every rank computes on with the sum, so every rank has the sum's whole gradient.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: TensorParallel) -> Tensor:
        """Return the sum, the same on every rank."""
        return ranks.all_gather(own).sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient as it is, because every rank has the same one."""
        return gradient, None
