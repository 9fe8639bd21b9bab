"""A mixture of experts as its papers write it: every expert computes every token, most count 0.

No line is shared with the package under test. What routers leave beside their output is collected
in tables of this module.

Shapes: b batch, s sequence, h hidden, E experts, k chosen ones.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Left(NamedTuple):
    """One loss of one router."""

    name: str
    value: torch.Tensor
    coefficient: float


left: list[Left] = []
"""Losses of routers since somebody took them."""

loads: dict[str, torch.Tensor] = {}
"""How many tokens have chosen each expert, by the name of the mixture, since it was cleared."""

so_far: dict[str, torch.Tensor] = {}
"""The same by the scores alone: what the loss of a global batch compares."""

biases: dict[str, torch.Tensor] = {}
"""A bias of each expert for the choice, by the name of the mixture; none: it is 0."""

is_recording = False
"""Whether choices are counted: while ``plain_loss`` computes gradients."""

is_training = True
"""Whether choices are balanced by Sinkhorn's algorithm, if the options say so."""

Parameters = dict[str, torch.Tensor]
MLP = Callable[[Parameters, str, torch.Tensor, Any], torch.Tensor]


def mixture(
    parameters: Parameters, name: str, x_bsh: torch.Tensor, options: Any, mlp: MLP
) -> torch.Tensor:
    """The weighted sum of all experts, and the expert that all tokens pass."""
    logits_bse = x_bsh @ parameters[f"{name}.router.weight"].T
    if f"{name}.router.bias" in parameters:
        logits_bse = logits_bse + parameters[f"{name}.router.bias"]
    bias_e = biases.get(name, torch.zeros(options.num_experts, dtype=logits_bse.dtype))
    if "sinkhorn" in types(options):
        weights_bse = sinkhorn_weights(logits_bse, options)
    else:
        weights_bse = weights(logits_bse, options, bias_e)
    counted(loads, name, weights_bse > 0)
    if options.moe_expert_capacity_factor is not None:
        weights_bse = weights_bse * kept(weights_bse.detach(), options)
    router_losses(logits_bse, options, name)
    total = torch.zeros_like(x_bsh)
    for expert in range(options.num_experts):
        own = {
            key.replace(f"{name}.experts.", "e."): value.chunk(options.num_experts)[expert]
            for key, value in parameters.items()
            if key.startswith(f"{name}.experts.")
        }
        made_bsh = mlp(own, "e", x_bsh, options)
        total = total + weights_bse[..., expert, None] * made_bsh
    if options.moe_shared_expert_intermediate_size:
        shared_bsh = mlp(parameters, f"{name}.shared_experts", x_bsh, options)
        if options.moe_shared_expert_gate:
            shared_bsh = (
                torch.sigmoid(x_bsh @ parameters[f"{name}.shared_gate.weight"].T) * shared_bsh
            )
        total = total + shared_bsh
    return total


def counted(table: dict[str, torch.Tensor], name: str, chosen_bse: torch.Tensor) -> None:
    """Add choices to a table while gradients are computed; other forwards leave nothing there."""
    if not is_recording:
        return
    times_e = chosen_bse.to(torch.float64).sum((0, 1))
    table[name] = table.get(name, torch.zeros_like(times_e)) + times_e


def types(options: Any) -> tuple[str, ...]:
    """What balances the experts."""
    given = options.moe_router_load_balancing_type
    return (given,) if isinstance(given, str) else given


def weights(
    logits_bse: torch.Tensor, options: Any, bias_e: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """How much every expert counts for every token, 0 for most; the bias is for the choice only."""
    if options.moe_router_score_function == "sigmoid":
        scores = 1 / (1 + torch.exp(-logits_bse))
    else:
        scores = torch.exp(logits_bse) / torch.exp(logits_bse).sum(-1, keepdim=True)
    is_softmax = options.moe_router_score_function == "softmax"
    by_logits = is_softmax and not options.moe_router_pre_softmax
    # Megatron-LM judges groups by sums of logits where the softmax comes after the choice.
    is_open = allowed((logits_bse if by_logits else scores) + bias_e, options)
    is_chosen = chosen(scores + bias_e, options.moe_router_topk, is_open)
    weights_bse = torch.where(is_chosen, scores, 0.0)
    if by_logits or (not is_softmax and options.moe_router_topk > 1):
        weights_bse = weights_bse / weights_bse.sum(-1, keepdim=True)
    factor: float = options.moe_router_topk_scaling_factor
    return weights_bse * factor


def sinkhorn_weights(logits_bse: torch.Tensor, options: Any) -> torch.Tensor:
    """The same where training scales rows and columns before tokens choose."""
    k, everything = options.moe_router_topk, torch.ones_like(logits_bse, dtype=torch.bool)
    if k == 1:
        scores = 1 / (1 + torch.exp(-logits_bse))
    else:
        scores = torch.exp(logits_bse) / torch.exp(logits_bse).sum(-1, keepdim=True)
    ranked = scores
    if is_training:
        matrix = torch.exp(logits_bse.detach()).flatten(0, 1)
        tokens, experts = matrix.shape
        column, change = torch.ones(experts, dtype=matrix.dtype), 1.0
        while change > 1e-4:
            row = 1 / (tokens * (matrix @ column))
            new = 1 / (experts * (row @ matrix))
            column, change = new, (new - column).abs().mean().item()
        ranked = (row[:, None] * matrix * column).view_as(logits_bse)
    return torch.where(chosen(ranked, k, everything), scores, 0.0)


def kept(weights_bse: torch.Tensor, options: Any) -> torch.Tensor:
    """Which choices the experts take, of a microbatch: 1, or 0 for those beyond the capacity."""
    by_place_ne = weights_bse.transpose(0, 1).flatten(0, 1)
    taken_ne = torch.zeros_like(by_place_ne)
    mean = len(by_place_ne) * options.moe_router_topk / options.num_experts
    most = math.ceil(mean * options.moe_expert_capacity_factor)
    for expert in range(options.num_experts):
        asking = by_place_ne[:, expert].nonzero().flatten().tolist()
        if options.moe_token_drop_policy == "probs":
            asking.sort(key=lambda token: -by_place_ne[token, expert].item())
        taken_ne[asking[:most], expert] = 1
    samples, length, _ = weights_bse.shape
    return taken_ne.view(length, samples, -1).transpose(0, 1)


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


def router_losses(logits_bse: torch.Tensor, options: Any, name: str) -> None:
    """Leave the losses of one router."""
    experts, k = options.num_experts, options.moe_router_topk
    if options.moe_router_score_function == "sigmoid":
        scores = 1 / (1 + torch.exp(-logits_bse))
    else:
        scores = torch.exp(logits_bse)
    shares = scores / scores.sum(-1, keepdim=True)
    picked = chosen(shares, k, torch.ones_like(shares, dtype=torch.bool)).to(shares.dtype)
    coefficients = options.moe_aux_loss_coeff
    if isinstance(coefficients, float):
        coefficients = (coefficients,)
    for kind, coefficient in zip(types(options), coefficients, strict=True):
        fractions, means = picked.mean((0, 1)) / k, shares.mean((0, 1))
        if kind == "aux_loss":
            value, called = experts * (fractions * means).sum(), "load_balancing_loss"
        elif kind == "seq_aux_loss":
            by_sequence = (picked.mean(1) / k * shares.mean(1)).sum(-1)
            value, called = experts * by_sequence.mean(), "seq_load_balancing_loss"
        elif kind == "global_aux_loss":
            fractions = so_far.get(name, picked.sum((0, 1)))
            fractions = fractions / fractions.sum()
            value, called = experts * (fractions * means).sum(), "global_load_balancing_loss"
        else:
            continue
        if coefficient:
            left.append(Left(called, value, coefficient))
    if options.moe_z_loss_coeff:
        squares_bs = torch.logsumexp(logits_bse, -1) ** 2
        left.append(Left("z_loss", squares_bs.mean(), options.moe_z_loss_coeff))
