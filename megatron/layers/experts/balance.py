"""Losses that balance the experts of a layer, and the loss that keeps the router's logits small.

The balancing loss is e times the sum over experts of their share of choices times their mean score
(arXiv 2101.03961, equation 4). It is 1 if all experts have equally many tokens. Choices are by the
scores alone, without groups and without the expert bias, as in Megatron. Shares are of the tokens
of a microbatch, of every sequence (arXiv 2412.19437, equation 17), or of the global batch so far
(arXiv 2501.11873). They are counted over all ranks that have such tokens, and have no gradient.
Mean scores are of this rank's tokens. ``slice_balance.py`` is for slices of microbatches.

Shapes: b batch, u tokens of a sequence that a rank has outside of attention and MLP, e experts.
"""

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from megatron.layers.experts.order import times_chosen
from megatron.layers.experts.slice_balance import imbalance, imbalance_of_slices
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.site import Site
from megatron.parallel import collectives

Balance: TypeAlias = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]
"""What balances the experts: a loss that compares the tokens of a microbatch, of every sequence or
of the global batch; the way in which tokens choose (``sinkhorn``); or nothing."""

LOSS_NAMES: Final[Mapping[Balance, str]] = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""The names of balancing losses in the log, as in Megatron."""

Z_LOSS: Final = "z_loss"

LEAST: Final = 1e-20
"""Is added to sums that weights are divided by, as in Megatron."""


def leave_balancing_losses(
    scores_bue: Tensor,
    topk: int,
    balances: Mapping[Balance, float],
    forward_pass: ForwardPass,
    site: Site,
) -> None:
    """Leave every balancing loss of a layer.

    Args:
        scores_bue: adding up to 1 for every token.
        topk: experts that a token chooses.
        balances: coefficients of the losses.
        forward_pass: gets the losses.
        site: says which ranks have other tokens.
    """
    experts = scores_bue.shape[-1]
    chosen_buk = scores_bue.detach().topk(topk, dim=-1).indices
    own_be, means_be = times_chosen(chosen_buk.flatten(1), experts), scores_bue.mean(1)
    times_be = own_be
    if "aux_loss" in balances or "seq_aux_loss" in balances:
        times_be = over_sequence(own_be, site)
    sliced = forward_pass.sliced
    for balance, coefficient in balances.items():
        name, times_xe, means_xe = LOSS_NAMES[balance], times_be, means_be
        if balance != "seq_aux_loss":
            means_xe = means_be.mean(0, keepdim=True)
        if balance == "aux_loss":
            times_xe = times_be.sum(0, keepdim=True)
        elif balance == "global_aux_loss":
            times_xe = _so_far(own_be.sum(0, keepdim=True), forward_pass, site)
        if sliced is None:
            loss = imbalance(times_xe, means_xe)
        else:
            loss = imbalance_of_slices(times_xe, means_xe, sliced, (forward_pass.layer, name))
        forward_pass.leave_loss(name, loss, coefficient)


def over_sequence(summand: Tensor, site: Site) -> Tensor:
    """Return the sum over the ranks that have other tokens of the same sequences."""
    summand = _over_tensor(summand, site)
    if site.context.size == 1:
        return summand
    # A copy: the caller still counts its own choices for the loss over the global batch.
    return collectives.all_reduce(summand.clone(), collectives.SUM, site.context.axis)


def _over_tensor(summand: Tensor, site: Site) -> Tensor:
    if site.tensor.sequence_parts == 1:
        return summand
    return site.tensor.all_gather(summand).sum(0)


def _so_far(own_1e: Tensor, forward_pass: ForwardPass, site: Site) -> Tensor:
    """Return the choices of the global batch in this microbatch and in all earlier ones.

    Of a microbatch's slices the last one has all of them, and the others have none.
    """

    def everywhere() -> Tensor:
        times_1e = _over_tensor(own_1e, site)
        if site.data.size > 1:
            times_1e = collectives.all_reduce(times_1e, collectives.SUM, site.data)
        return times_1e

    assert forward_pass.losses is not None, "only training has losses"
    so_far_1e = forward_pass.losses.choices_so_far(forward_pass.layer, everywhere)
    part = forward_pass.part
    return so_far_1e if part is None or part.is_last else torch.zeros_like(so_far_1e)
