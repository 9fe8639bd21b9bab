"""The router of a mixture of experts: which experts a token chooses, and how much each counts.

A token's score of an expert is a softmax over all experts, or a sigmoid of each. It chooses the k
experts with the best scores, from the best groups alone if experts form groups (arXiv 2412.19437,
section 2.1.2). The loss that balances the experts (arXiv 2101.03961, equation 4; by sequence in
2412.19437, equation 17) and the one that keeps logits small (arXiv 2202.08906, equation 5) are
losses of the layer's own.

Shapes: b batch, u tokens of a sequence that a rank has outside of attention and MLP, k choices of a
token, e experts, g groups of them.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from megatron.layers.experts.order import times_chosen
from megatron.layers.experts.wide_linear import wide_linear
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.site import Site
from megatron.parallel import collectives

Score: TypeAlias = Literal["softmax", "sigmoid"]
"""Of an expert: by a softmax over all experts, or by its own sigmoid."""

Balance: TypeAlias = Literal["aux_loss", "seq_aux_loss", "none"]
"""Experts shall have equally many tokens of a microbatch, or of every sequence; or nothing does."""

_LEAST: float = 1e-20
"""Is added to sums that weights are divided by, as in Megatron."""


@dataclass(frozen=True)
class RouterOptions:
    """How tokens choose.

    Attributes:
        experts: e.
        topk: k.
        score: of an expert.
        pre_softmax: the softmax is over all experts, not over the chosen ones.
        groups: g, of which ``group_topk`` may be chosen from; 1: all experts are in one.
        group_topk: groups that a token may choose from.
        scaling: factor of the weights.
        balance: what the balancing loss compares.
        balance_coeff: its coefficient.
        z_loss_coeff: coefficient of the mean squared logarithm of the sum of exponentials.
        in_fp32: logits are products in fp32.
    """

    experts: int
    topk: int
    score: Score = "softmax"
    pre_softmax: bool = False
    groups: int = 1
    group_topk: int = 1
    scaling: float = 1.0
    balance: Balance = "aux_loss"
    balance_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    in_fp32: bool = False


class Choice(NamedTuple):
    """What tokens have chosen.

    Attributes:
        experts_buk: int64, all of a token different.
        weights_buk: how much each counts; fp32 or wider.
    """

    experts_buk: Tensor
    weights_buk: Tensor


class Router(nn.Module):
    """Scores experts by one matrix.

    Args:
        options: how tokens choose.
        hidden_size: h.
        site: what the router is built in.
    """

    def __init__(self, options: RouterOptions, hidden_size: int, site: Site) -> None:
        super().__init__()
        self.options, self._site = options, site
        weight_eh = torch.empty(options.experts, hidden_size, dtype=site.dtype, device=site.device)
        self.weight = nn.Parameter(weight_eh)

    def forward(self, x_buh: Tensor, forward_pass: ForwardPass) -> Choice:
        """Choose for every token, and leave the losses of the choice in ``forward_pass``."""
        options = self.options
        wide = torch.promote_types(x_buh.dtype, torch.float32)
        dtype = wide if options.in_fp32 else x_buh.dtype
        logits_bue = wide_linear(x_buh, self.weight, dtype).to(wide)
        if forward_pass.losses is not None:
            self._leave_losses(logits_bue, forward_pass)
        return choose(logits_bue, options)

    def _leave_losses(self, logits_bue: Tensor, forward_pass: ForwardPass) -> None:
        options = self.options
        if options.balance != "none" and options.balance_coeff:
            balance = self._imbalance(logits_bue)
            forward_pass.leave_loss(options.balance_coeff * balance)
        if options.z_loss_coeff:
            squares_bu = logits_bue.logsumexp(-1).square()
            forward_pass.leave_loss(options.z_loss_coeff * squares_bu.mean())

    def _imbalance(self, logits_bue: Tensor) -> Tensor:
        """Return e times the sum over experts of their share of choices times their mean score.

        It is 1 if all have equally many tokens. Choices are those by the scores alone, without
        groups. Shares are of the tokens of all ranks that have parts of the same samples, which is
        why their sum has no gradient of its own; mean scores are of this rank's tokens.
        """
        options = self.options
        scores_bue = logits_bue.softmax(-1) if options.score == "softmax" else _shares(logits_bue)
        chosen_buk = scores_bue.topk(options.topk, dim=-1).indices
        times_be = self._over_ranks(times_chosen(chosen_buk.flatten(1), options.experts))
        scores_be = scores_bue.mean(1)
        if options.balance == "aux_loss":
            times_be, scores_be = times_be.sum(0, keepdim=True), scores_be.mean(0, keepdim=True)
        shares_be = times_be / times_be.sum(-1, keepdim=True)
        return options.experts * (shares_be.to(scores_be.dtype) * scores_be).sum(-1).mean()

    def _over_ranks(self, times_be: Tensor) -> Tensor:
        """Return the sum over the ranks that have other tokens of the same sequences."""
        tensor, context = self._site.tensor, self._site.context
        if tensor.sequence_parts > 1:
            times_be = tensor.all_gather(times_be).sum(0)
        if context.size > 1:
            times_be = collectives.all_reduce(times_be, collectives.SUM, context.axis)
        return times_be


def choose(logits_bue: Tensor, options: RouterOptions) -> Choice:
    """Return the choice that logits make.

    A softmax over the chosen experts gives weights that add up to 1. Sigmoids of several experts
    are divided by their sum; that of a single expert is its weight. With ``pre_softmax`` the
    weights are the scores themselves. The factor ``scaling`` comes last.
    """
    if options.score == "sigmoid":
        scores_bue = logits_bue.sigmoid()
    else:
        scores_bue = logits_bue.softmax(-1) if options.pre_softmax else logits_bue
    experts_buk = _best(scores_bue.detach(), options)
    weights_buk = scores_bue.gather(-1, experts_buk)
    if options.score == "sigmoid" and options.topk > 1:
        weights_buk = weights_buk / (weights_buk.sum(-1, keepdim=True) + _LEAST)
    elif options.score == "softmax" and not options.pre_softmax:
        weights_buk = weights_buk.softmax(-1)
    return Choice(experts_buk, weights_buk * options.scaling)


def _best(scores_bue: Tensor, options: RouterOptions) -> Tensor:
    """Return the chosen experts: the best of the best groups, [b, u, k].

    A group is as good as the sum of its best experts, k / ``group_topk`` of them.
    """
    if options.groups > 1:
        by_group = scores_bue.unflatten(-1, (options.groups, -1))
        best = by_group.topk(options.topk // options.group_topk, dim=-1).values.sum(-1)
        chosen_bug = best.topk(options.group_topk, dim=-1).indices
        is_open_bug = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, chosen_bug, True)
        by_group = by_group.masked_fill(~is_open_bug.unsqueeze(-1), -torch.inf)
        scores_bue = by_group.flatten(-2)
    return scores_bue.topk(options.topk, dim=-1).indices


def _shares(logits_bue: Tensor) -> Tensor:
    """Return sigmoids as shares of their sum."""
    scores_bue = logits_bue.sigmoid()
    return scores_bue / (scores_bue.sum(-1, keepdim=True) + _LEAST)
