"""The router of a mixture of experts: which experts a token chooses, and how much each counts.

A token's score of an expert is a softmax over all experts, or a sigmoid of each. It chooses the k
experts with the best scores, from the best groups alone if experts form groups (arXiv 2412.19437,
section 2.1.2). A *bias* of every expert may join the scores for the choice, never for the weights;
it balances the experts without a loss (arXiv 2408.15664). Other ways to balance experts stand in
``balance.py`` (losses) and ``sinkhorn.py`` (another way to choose).

Shapes: b batch, u tokens of a sequence that a rank has outside of attention and MLP, k choices of a
token, e experts, g groups of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from megatron.layers.experts.balance import (
    LEAST,
    LOSS_NAMES,
    Z_LOSS,
    Balance,
    leave_balancing_losses,
    over_sequence,
)
from megatron.layers.experts.capacity import Capacity
from megatron.layers.experts.noise import replaced, with_jitter
from megatron.layers.experts.order import times_chosen
from megatron.layers.experts.sinkhorn import balanced
from megatron.layers.experts.wide_linear import wide_linear
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.site import Site

Score: TypeAlias = Literal["softmax", "sigmoid"]
"""Of an expert: by a softmax over all experts, or by its own sigmoid."""


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
        group_best: experts whose scores together are a group's; ``None``: k / ``group_topk``.
        scaling: factor of the weights.
        balances: what balances the experts, with the coefficient of each loss.
        z_loss_coeff: coefficient of the mean squared logarithm of the sum of exponentials
            (arXiv 2202.08906, equation 5).
        dtype: of the product that makes logits, if it is wider than activations, and of all that
            follows up to the weights of choices; ``None``: logits are products in the type of
            activations, and what follows is in fp32 at least.
        has_bias: a bias of every expert joins the scores for the choice.
        bias_rate: change of the bias after an iteration.
        is_forced: random logits take the place of the router's.
        jitter: largest relative noise on the input.
        capacity: how many tokens an expert takes; ``None``: all that choose it.
        linear_bias: the logits have a bias, which is trained like any other.
    """

    experts: int
    topk: int
    score: Score = "softmax"
    pre_softmax: bool = False
    groups: int = 1
    group_topk: int = 1
    scaling: float = 1.0
    balances: tuple[tuple[Balance, float], ...] = ()
    z_loss_coeff: float = 0.0
    dtype: torch.dtype | None = None
    has_bias: bool = False
    bias_rate: float = 1e-3
    is_forced: bool = False
    jitter: float = 0.0
    capacity: Capacity | None = None
    group_best: int | None = None
    linear_bias: bool = False

    @property
    def losses(self) -> dict[Balance, float]:
        """The balancing losses with their coefficients."""
        return {kind: factor for kind, factor in self.balances if kind in LOSS_NAMES and factor}

    @property
    def by_sinkhorn(self) -> bool:
        """Whether training balances the choices themselves."""
        return any(kind == "sinkhorn" for kind, _ in self.balances)


class Choice(NamedTuple):
    """The choices of tokens.

    Attributes:
        experts_buk: int64, all of a token different.
        weights_buk: how much each counts; fp32 or wider. Dropped ones have the weight 0.
        kept_buk: bool, the choices that no full expert has dropped; ``None``: all.
    """

    experts_buk: Tensor
    weights_buk: Tensor
    kept_buk: Tensor | None = None


class Router(nn.Module):
    """Scores experts by one matrix.

    Args:
        options: how tokens choose.
        hidden_size: h.
        site: device, dtype, kernels and ranks of the router.

    Attributes:
        expert_bias: fp32 [e], which no gradient reaches; training changes it after every iteration
            (``megatron.training.expert_biases``). ``None``: there is none.
    """

    expert_bias: Tensor | None

    def __init__(self, options: RouterOptions, hidden_size: int, site: Site) -> None:
        super().__init__()
        self.options, self._site = options, site
        weight_eh = torch.empty(options.experts, hidden_size, dtype=site.dtype, device=site.device)
        self.weight = nn.Parameter(weight_eh)
        self.bias: nn.Parameter | None = None
        if options.linear_bias:
            self.bias = nn.Parameter(weight_eh.new_empty(options.experts))
        bias_e = None
        if options.has_bias:
            bias_e = torch.zeros(options.experts, dtype=torch.float32, device=site.device)
        self.register_buffer("expert_bias", bias_e)

    @property
    def losses_left(self) -> Sequence[str]:
        """As in ``LeavesLosses``."""
        names = [LOSS_NAMES[kind] for kind in self.options.losses]
        return [*names, *[Z_LOSS] * bool(self.options.z_loss_coeff)]

    @property
    def leaves_load(self) -> bool:
        """As in ``LeavesLosses``."""
        return True

    def forward(self, x_buh: Tensor, forward_pass: ForwardPass) -> Choice:
        """Choose for every token, and leave losses and load of the choice in ``forward_pass``."""
        options, site = self.options, self._site
        wide = torch.promote_types(x_buh.dtype, torch.float32)
        dtype = torch.promote_types(x_buh.dtype, options.dtype or x_buh.dtype)
        noisy_buh = with_jitter(x_buh, options.jitter, forward_pass, site)
        logits_bue = wide_linear(noisy_buh, self.weight, dtype, site.kernels)
        logits_bue = logits_bue.to(torch.promote_types(dtype, wide))
        if self.bias is not None:
            logits_bue = logits_bue + self.bias
        if options.is_forced:
            logits_bue = replaced(logits_bue, forward_pass, site)
        if forward_pass.losses is not None:
            self._leave_losses(logits_bue, forward_pass)
        if options.by_sinkhorn:
            choice = self._by_sinkhorn(logits_bue, is_training=forward_pass.seeds is not None)
        else:
            choice = choose(logits_bue, options, self.expert_bias)
        choice = choice._replace(weights_buk=choice.weights_buk.to(wide))
        if forward_pass.counts_load:
            times_e = times_chosen(choice.experts_buk.flatten(), options.experts)
            forward_pass.leave_load(times_e)
        return self._without_dropped(choice)

    def _leave_losses(self, logits_bue: Tensor, forward_pass: ForwardPass) -> None:
        options = self.options
        if options.losses:
            is_softmax = options.score == "softmax"
            scores_bue = logits_bue.softmax(-1) if is_softmax else _shares(logits_bue)
            leave_balancing_losses(
                scores_bue, options.topk, options.losses, forward_pass, self._site
            )
        if options.z_loss_coeff:
            squares_bu = logits_bue.logsumexp(-1).square()
            forward_pass.leave_loss(Z_LOSS, squares_bu.mean(), options.z_loss_coeff)

    def _by_sinkhorn(self, logits_bue: Tensor, *, is_training: bool) -> Choice:
        """Choose by balanced scores in training, else by the scores alone, as in Megatron.

        The scores are sigmoids if a token chooses one expert, and a softmax over all experts
        otherwise. The weights are the scores of the chosen experts.
        """
        topk, site = self.options.topk, self._site
        scores_bue = logits_bue.sigmoid() if topk == 1 else logits_bue.softmax(-1)
        ranked_bue = scores_bue.detach()
        if is_training:
            logits_ne = logits_bue.detach().flatten(0, 1)
            tokens = len(logits_ne) * site.tensor.sequence_parts * site.context.size
            ranked_ne = balanced(logits_ne, tokens, lambda own: over_sequence(own, site))
            ranked_bue = ranked_ne.view_as(scores_bue)
        experts_buk = ranked_bue.topk(topk, dim=-1).indices
        return Choice(experts_buk, scores_bue.gather(-1, experts_buk))

    def _without_dropped(self, choice: Choice) -> Choice:
        """Return the choices; a choice that a full expert drops has weight 0."""
        capacity = self.options.capacity
        if capacity is None:
            return choice
        experts_buk, weights_buk = choice.experts_buk, choice.weights_buk
        kept_buk = capacity.kept(
            experts_buk, weights_buk.detach(), self.options.experts, self._site
        )
        return Choice(experts_buk, weights_buk * kept_buk, kept_buk)


def choose(logits_bue: Tensor, options: RouterOptions, bias_e: Tensor | None = None) -> Choice:
    """Return the choice that logits make.

    A softmax over the chosen experts gives weights that add up to 1. Sigmoids of several experts
    are divided by their sum; that of a single expert is its weight. With ``pre_softmax`` the
    weights are the scores themselves. The factor ``scaling`` comes last. ``bias_e`` joins the
    scores for the choice only.
    """
    if options.score == "sigmoid":
        scores_bue = logits_bue.sigmoid()
    else:
        scores_bue = logits_bue.softmax(-1) if options.pre_softmax else logits_bue
    ranked_bue = scores_bue.detach()
    experts_buk = _best(ranked_bue if bias_e is None else ranked_bue + bias_e, options)
    weights_buk = scores_bue.gather(-1, experts_buk)
    if options.score == "sigmoid" and options.topk > 1:
        weights_buk = weights_buk / (weights_buk.sum(-1, keepdim=True) + LEAST)
    elif options.score == "softmax" and not options.pre_softmax:
        weights_buk = weights_buk.softmax(-1)
    return Choice(experts_buk, weights_buk * options.scaling)


def _best(scores_bue: Tensor, options: RouterOptions) -> Tensor:
    """Return the chosen experts: the best of the best groups, [b, u, k].

    A group is as good as the sum of its best experts, ``group_best`` of them.
    """
    if options.groups > 1:
        by_group = scores_bue.unflatten(-1, (options.groups, -1))
        experts = options.group_best or options.topk // options.group_topk
        best = by_group.topk(experts, dim=-1).values.sum(-1)
        chosen_bug = best.topk(options.group_topk, dim=-1).indices
        is_open_bug = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, chosen_bug, True)
        by_group = by_group.masked_fill(~is_open_bug.unsqueeze(-1), -torch.inf)
        scores_bue = by_group.flatten(-2)
    return scores_bue.topk(options.topk, dim=-1).indices


def _shares(logits_bue: Tensor) -> Tensor:
    """Return sigmoids as shares of their sum."""
    scores_bue = logits_bue.sigmoid()
    return scores_bue / (scores_bue.sum(-1, keepdim=True) + LEAST)
