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
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.layers.experts.balance import (
    LEAST,
    LOSS_NAMES,
    Z_LOSS,
    leave_balancing_losses,
    over_sequence,
)
from megatron.layers.experts.noise import replaced, with_jitter
from megatron.layers.experts.order import times_chosen
from megatron.layers.experts.settings import BalanceSettings, ExpertSettings
from megatron.layers.experts.sinkhorn import balanced
from megatron.layers.experts.wide_linear import wide_linear
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.site import Site


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
        settings: how tokens choose. With a wider ``dtype``, all that follows the logits is in it,
            up to the weights of choices; otherwise it is in fp32 at least.
        balance: what balances the experts. The z-loss is that of arXiv 2202.08906, equation 5.
        hidden_size: h.
        site: device, dtype, kernels and ranks of the router.
        bias: the logits have a bias, which is trained like any other.

    Attributes:
        expert_bias: fp32 [e], which no gradient reaches; training changes it after every iteration
            (``megatron.training.expert_biases``). ``None``: there is none.
    """

    expert_bias: Tensor | None

    def __init__(
        self,
        settings: ExpertSettings,
        balance: BalanceSettings,
        hidden_size: int,
        site: Site,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.settings, self.balance, self._site = settings, balance, site
        experts = settings.num_experts
        weight_eh = torch.empty(experts, hidden_size, dtype=site.dtype, device=site.device)
        self.weight = nn.Parameter(weight_eh)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(weight_eh.new_empty(experts))
        bias_e = None
        if balance.moe_router_enable_expert_bias:
            bias_e = torch.zeros(experts, dtype=torch.float32, device=site.device)
        self.register_buffer("expert_bias", bias_e)

    @property
    def losses_left(self) -> Sequence[str]:
        """As in ``LeavesLosses``."""
        names = [LOSS_NAMES[kind] for kind in self.balance.losses]
        return [*names, *[Z_LOSS] * bool(self.balance.moe_z_loss_coeff)]

    @property
    def leaves_load(self) -> bool:
        """As in ``LeavesLosses``."""
        return True

    def forward(self, x_buh: Tensor, forward_pass: ForwardPass) -> Choice:
        """Choose for every token, and leave losses and load of the choice in ``forward_pass``."""
        settings, balance, site = self.settings, self.balance, self._site
        wide = torch.promote_types(x_buh.dtype, torch.float32)
        dtype = torch.promote_types(x_buh.dtype, settings.dtype or x_buh.dtype)
        noisy_buh = with_jitter(x_buh, balance.moe_input_jitter_eps, forward_pass, site)
        logits_bue = wide_linear(noisy_buh, self.weight, dtype, site.kernels)
        logits_bue = logits_bue.to(torch.promote_types(dtype, wide))
        if self.bias is not None:
            logits_bue = logits_bue + self.bias
        if balance.moe_router_force_load_balancing and not forward_pass.is_apart:
            logits_bue = replaced(logits_bue, forward_pass, site)
        if forward_pass.losses is not None:
            self._leave_losses(logits_bue, forward_pass)
        if balance.is_by_sinkhorn:
            choice = self._by_sinkhorn(logits_bue, is_training=forward_pass.seeds is not None)
        else:
            choice = choose(logits_bue, settings, self.expert_bias)
        choice = choice._replace(weights_buk=choice.weights_buk.to(wide))
        if forward_pass.counts_load:
            times_e = times_chosen(choice.experts_buk.flatten(), settings.num_experts)
            forward_pass.leave_load(times_e)
        return choice if forward_pass.is_apart else self._without_dropped(choice)

    def _leave_losses(self, logits_bue: Tensor, forward_pass: ForwardPass) -> None:
        losses, settings = self.balance.losses, self.settings
        if losses:
            is_softmax = settings.moe_router_score_function == "softmax"
            scores_bue = logits_bue.softmax(-1) if is_softmax else _shares(logits_bue)
            leave_balancing_losses(
                scores_bue, settings.moe_router_topk, losses, forward_pass, self._site
            )
        if self.balance.moe_z_loss_coeff:
            squares_bu = logits_bue.logsumexp(-1).square()
            forward_pass.leave_loss(Z_LOSS, squares_bu.mean(), self.balance.moe_z_loss_coeff)

    def _by_sinkhorn(self, logits_bue: Tensor, *, is_training: bool) -> Choice:
        """Choose by balanced scores in training, else by the scores alone, as in Megatron.

        The scores are sigmoids if a token chooses one expert, and a softmax over all experts
        otherwise. The weights are the scores of the chosen experts.
        """
        topk, site = self.settings.moe_router_topk, self._site
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
        capacity = self.balance.capacity
        if capacity is None:
            return choice
        experts_buk, weights_buk = choice.experts_buk, choice.weights_buk
        kept_buk = capacity.kept(
            experts_buk, weights_buk.detach(), self.settings.num_experts, self._site
        )
        return Choice(experts_buk, weights_buk * kept_buk, kept_buk)


def choose(logits_bue: Tensor, settings: ExpertSettings, bias_e: Tensor | None = None) -> Choice:
    """Return the choice that logits make.

    A softmax over the chosen experts gives weights that add up to 1. Sigmoids of several experts
    are divided by their sum; that of a single expert is its weight. With
    ``moe_router_pre_softmax`` the weights are the scores themselves. The factor of all weights
    comes last. ``bias_e`` joins the scores for the choice only.
    """
    is_softmax = settings.moe_router_score_function == "softmax"
    topk, before = settings.moe_router_topk, settings.moe_router_pre_softmax
    if not is_softmax:
        scores_bue = logits_bue.sigmoid()
    else:
        scores_bue = logits_bue.softmax(-1) if before else logits_bue
    ranked_bue = scores_bue.detach()
    experts_buk = _best(ranked_bue if bias_e is None else ranked_bue + bias_e, settings)
    weights_buk = scores_bue.gather(-1, experts_buk)
    if not is_softmax and topk > 1:
        weights_buk = weights_buk / (weights_buk.sum(-1, keepdim=True) + LEAST)
    elif is_softmax and not before:
        weights_buk = weights_buk.softmax(-1)
    return Choice(experts_buk, weights_buk * settings.moe_router_topk_scaling_factor)


def _best(scores_bue: Tensor, settings: ExpertSettings) -> Tensor:
    """Return the chosen experts: the best of the best groups, [b, u, k].

    A group is as good as the sum of its best experts, ``moe_router_group_best`` of them.
    """
    topk, groups = settings.moe_router_topk, settings.moe_router_num_groups or 1
    if groups > 1:
        open_groups = settings.moe_router_group_topk or 1
        by_group = scores_bue.unflatten(-1, (groups, -1))
        experts = settings.moe_router_group_best or topk // open_groups
        best = by_group.topk(experts, dim=-1).values.sum(-1)
        chosen_bug = best.topk(open_groups, dim=-1).indices
        is_open_bug = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, chosen_bug, True)
        # Not 0: logits, and scores with a bias, may be negative in open groups.
        by_group = by_group.masked_fill(~is_open_bug.unsqueeze(-1), -torch.inf)
        scores_bue = by_group.flatten(-2)
    return scores_bue.topk(topk, dim=-1).indices


def _shares(logits_bue: Tensor) -> Tensor:
    """Return sigmoids as shares of their sum."""
    scores_bue = logits_bue.sigmoid()
    return scores_bue / (scores_bue.sum(-1, keepdim=True) + LEAST)
