"""Capacities: an expert takes at most so many tokens of a microbatch; further choices are dropped.

The capacity counts the tokens of a whole microbatch, over all ranks that share its samples, so that
which choices are dropped does not depend on the layout.

Shapes: b batch, u tokens of a sequence that a rank has outside of attention and MLP, s tokens of
it, k choices of a token, n = s b tokens, e experts.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from megatron.layers.site import Site

DropPolicy: TypeAlias = Literal["probs", "position"]
"""Which choices an expert keeps: those with the largest weights, or the first ones."""


@dataclass(frozen=True)
class Capacity:
    """How many tokens an expert takes.

    Attributes:
        factor: of the mean number of tokens of an expert.
        policy: which choices an expert keeps.
    """

    factor: float
    policy: DropPolicy = "probs"

    def kept(self, experts_buk: Tensor, weights_buk: Tensor, experts: int, site: Site) -> Tensor:
        """Return which choices the experts keep, bool [b, u, k]; the host does not wait.

        Args:
            experts_buk: int64, the experts that tokens have chosen.
            weights_buk: how much each choice counts, without a graph.
            experts: e.
            site: says which ranks have the other tokens.
        """
        experts_bsk = _whole(experts_buk, site)
        samples, length, topk = experts_bsk.shape
        most = math.ceil(samples * length * topk / experts * self.factor)
        if most >= samples * length:
            return torch.ones_like(experts_buk, dtype=torch.bool)
        # Earlier positions first, and of one position earlier samples.
        experts_nk = experts_bsk.transpose(0, 1).flatten(0, 1)
        if self.policy == "probs":
            weights_nk = _whole(weights_buk, site).transpose(0, 1).flatten(0, 1)
            kept_nk = _heaviest(experts_nk, weights_nk, experts, most)
        else:
            kept_nk = _first(experts_nk, experts, most)
        kept_bsk = kept_nk.unflatten(0, (length, samples)).transpose(0, 1)
        return site.tensor.own_tokens(site.context.own_tokens(kept_bsk))


def _whole(x_buk: Tensor, site: Site) -> Tensor:
    """Return the tokens of all ranks that share the samples, in their order, [b, s, k]."""
    x_btk = site.tensor.gather(x_buk) if site.tensor.sequence_parts > 1 else x_buk
    if site.context.size == 1:
        return x_btk
    return site.context.gather(x_btk.unsqueeze(0).contiguous())[0]


def _heaviest(experts_nk: Tensor, weights_nk: Tensor, experts: int, most: int) -> Tensor:
    """Return whether a choice is one of the ``most`` with the largest weights of its expert."""
    # Below all weights, so a token that has not chosen the expert takes no place from one that has.
    weights_ne = weights_nk.new_full((len(weights_nk), experts), -1.0)
    weights_ne.scatter_(1, experts_nk, weights_nk)
    heaviest = weights_ne.topk(most, dim=0).indices
    kept_ne = torch.zeros_like(weights_ne, dtype=torch.bool).scatter_(0, heaviest, True)
    return kept_ne.gather(1, experts_nk)


def _first(experts_nk: Tensor, experts: int, most: int) -> Tensor:
    """Return whether a choice is one of the first ``most`` of its expert."""
    chosen_ne = experts_nk.new_zeros(len(experts_nk), experts).scatter_(1, experts_nk, 1)
    return (chosen_ne.cumsum(0) <= most).gather(1, experts_nk)
