"""A mixture of experts as its papers write it: every expert computes every token, most count 0.

No line is shared with the package under test. Losses of the router are collected in a list, in the
order of the layers.

Shapes: b batch, s sequence, h hidden, E experts, k chosen ones.
"""

from collections.abc import Callable
from typing import Any

import torch

left: list[torch.Tensor] = []
"""Losses of routers since somebody took them, one for each mixture that was computed."""

Parameters = dict[str, torch.Tensor]
MLP = Callable[[Parameters, str, torch.Tensor, Any], torch.Tensor]


def mixture(
    parameters: Parameters, name: str, x_bsh: torch.Tensor, options: Any, mlp: MLP
) -> torch.Tensor:
    """The weighted sum of all experts, and the expert that all tokens pass."""
    logits_bse = x_bsh @ parameters[f"{name}.router.weight"].T
    weights_bse = weights(logits_bse, options)
    left.append(router_losses(logits_bse, options))
    total = torch.zeros_like(x_bsh)
    for expert in range(options.num_experts):
        own = {
            f"{kind}.weight": parameters[f"{name}.experts.{kind}.weight"].chunk(
                options.num_experts
            )[expert]
            for kind in ("linear_fc1", "linear_fc2")
        }
        made_bsh = mlp({f"e.{key}": value for key, value in own.items()}, "e", x_bsh, options)
        total = total + weights_bse[..., expert, None] * made_bsh
    if options.moe_shared_expert_intermediate_size:
        shared_bsh = mlp(parameters, f"{name}.shared_experts", x_bsh, options)
        if options.moe_shared_expert_gate:
            shared_bsh = (
                torch.sigmoid(x_bsh @ parameters[f"{name}.shared_gate.weight"].T) * shared_bsh
            )
        total = total + shared_bsh
    return total


def weights(logits_bse: torch.Tensor, options: Any) -> torch.Tensor:
    """How much every expert counts for every token, 0 for most."""
    if options.moe_router_score_function == "sigmoid":
        scores = 1 / (1 + torch.exp(-logits_bse))
    else:
        scores = torch.exp(logits_bse) / torch.exp(logits_bse).sum(-1, keepdim=True)
    is_softmax = options.moe_router_score_function == "softmax"
    by_logits = is_softmax and not options.moe_router_pre_softmax
    # Megatron-LM judges groups by sums of logits where the softmax comes after the choice.
    is_open = allowed(logits_bse if by_logits else scores, options)
    kept = torch.where(chosen(scores, options.moe_router_topk, is_open), scores, 0.0)
    if by_logits or (not is_softmax and options.moe_router_topk > 1):
        kept = kept / kept.sum(-1, keepdim=True)
    factor: float = options.moe_router_topk_scaling_factor
    return kept * factor


def allowed(scores: torch.Tensor, options: Any) -> torch.Tensor:
    """Which experts are in the best groups."""
    groups, best = options.moe_router_num_groups, options.moe_router_group_topk
    if groups == 1:
        return torch.ones_like(scores, dtype=torch.bool)
    by_group = scores.view(*scores.shape[:-1], groups, -1)
    in_order = by_group.sort(-1, descending=True).values
    quality = in_order[..., : options.moe_router_topk // best].sum(-1)
    everywhere = torch.ones_like(quality, dtype=torch.bool)
    is_open = chosen(quality, best, everywhere)
    return is_open[..., None].expand_as(by_group).reshape(scores.shape)


def chosen(scores: torch.Tensor, k: int, among: torch.Tensor) -> torch.Tensor:
    """Whether an entry is one of the k largest: fewer than k others are larger."""
    scores = torch.where(among, scores.detach(), -torch.inf)
    larger = (scores[..., None, :] > scores[..., :, None]).sum(-1)
    return (larger < k) & among


def router_losses(logits_bse: torch.Tensor, options: Any) -> torch.Tensor:
    """The losses of one router, the sum."""
    experts, k = options.num_experts, options.moe_router_topk
    if options.moe_router_score_function == "sigmoid":
        scores = 1 / (1 + torch.exp(-logits_bse))
    else:
        scores = torch.exp(logits_bse)
    shares = scores / scores.sum(-1, keepdim=True)
    picked = chosen(shares, k, torch.ones_like(shares, dtype=torch.bool)).to(shares.dtype)
    loss: torch.Tensor = options.moe_z_loss_coeff * (torch.logsumexp(logits_bse, -1) ** 2).mean()
    if options.moe_router_load_balancing_type == "aux_loss":
        fractions, means = picked.mean((0, 1)) / k, shares.mean((0, 1))
        loss = loss + options.moe_aux_loss_coeff * experts * (fractions * means).sum()
    elif options.moe_router_load_balancing_type == "seq_aux_loss":
        fractions, means = picked.mean(1) / k, shares.mean(1)
        by_sequence = (fractions * means).sum(-1)
        loss = loss + options.moe_aux_loss_coeff * experts * by_sequence.mean()
    return loss
