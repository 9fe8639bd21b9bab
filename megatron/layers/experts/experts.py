"""A mixture of experts in the place of an MLP: every token passes k of e MLPs.

    y = sum over the chosen experts of weight * expert(x), plus shared(x)

The shared MLP, which all tokens pass, is optional. A token has a *slot* for each expert that it has
chosen, on the rank that has the expert (``route.py``). One grouped product serves all experts of a
rank. The weight of a choice multiplies the input of the expert's second layer, because a slot is
narrowest there. Choices are dropped only by experts with a capacity (``capacity.py``).

Shapes: b batch, s tokens of a sequence, u tokens of it that a rank has outside of the layer, h
hidden, k choices of a token, z slots of this rank, f inner width of an expert.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.kernels.autograd import apply, once_differentiable
from megatron.layers.experts.biases import weighted_biases, with_biases
from megatron.layers.experts.grouped_linear import GroupedLinear
from megatron.layers.experts.route import Route, route_of
from megatron.layers.experts.router import Choice, Router
from megatron.layers.experts.settings import BalanceSettings, ExpertSettings
from megatron.layers.experts.visit import at_the_experts
from megatron.layers.forward_pass import PLAIN_PASS, ForwardPass
from megatron.layers.mlp import MLP, Activation, function_of, is_gated
from megatron.layers.recompute import again, forgotten
from megatron.layers.site import Site
from megatron.parallel.deep_ep import VisitedExperts


class Experts(nn.Module):
    """e MLPs; every token passes k of them.

    Args:
        settings: sizes, and how tokens choose; the values are final.
        balance: what balances the experts.
        hidden_size: h.
        activation: function between the layers of an expert.
        site: device, dtype, ranks and kernels of the layer.
        bias: biases in both layers of every expert, of the shared MLP, and of the router.
    """

    def __init__(
        self,
        settings: ExpertSettings,
        balance: BalanceSettings,
        hidden_size: int,
        activation: Activation,
        site: Site,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self._ranks, self._kernels = site.experts, site.kernels
        self._number, self._host_knows = settings.num_experts, site.grouped_package is not None
        self.router = Router(settings, balance, hidden_size, site, bias=bias)
        self.experts = _TwoLayers(settings, hidden_size, activation, site, bias=bias)
        self.shared_experts: MLP | None = None
        self.shared_gate: nn.Linear | None = None
        if shared_size := settings.moe_shared_expert_intermediate_size:
            own_site = _site_of_shared(site)
            self.shared_experts = MLP(
                hidden_size, shared_size, own_site, activation=activation, bias=bias
            )
        if settings.moe_shared_expert_gate:
            self.shared_gate = nn.Linear(
                hidden_size, 1, bias=False, dtype=site.dtype, device=site.device
            )
        self._is_computed_again = "moe" in site.recomputation.parts

    def forward(self, x_buh: Tensor, forward_pass: ForwardPass = PLAIN_PASS) -> Tensor:
        """[b, u, h] -> [b, u, h], for the tokens that this rank has."""

        def run(x: Tensor) -> Tensor:
            return self._run(x, forward_pass)

        return again(run, x_buh) if self._is_computed_again else run(x_buh)

    def _run(self, x_buh: Tensor, forward_pass: ForwardPass) -> Tensor:
        choice: Choice = self.router(x_buh, forward_pass)
        mixed = self._mixing(x_buh, choice)
        beside_buh = self._shared(x_buh) if self.shared_experts is not None else None
        if self.experts.linear_fc2.bias is not None:
            biases_buh = weighted_biases(
                choice, self.experts.linear_fc2.bias.view(self._number, -1)
            )
            beside_buh = biases_buh if beside_buh is None else beside_buh + biases_buh
        # The experts come last: computing the mixture again then ends before their last product.
        y_buh = mixed()
        return y_buh if beside_buh is None else y_buh + beside_buh

    def _mixing(self, x_buh: Tensor, choice: Choice) -> Callable[[], Tensor]:
        """Return the function that computes the chosen experts; its route may be there before."""
        experts_buk, weights_buk, kept_buk = choice
        ranks, kernels, host_knows = self._ranks, self._kernels, self._host_knows
        if isinstance(ranks, VisitedExperts):
            return lambda: at_the_experts(
                self.experts, x_buh, choice, self._number, ranks, kernels, host_knows=host_knows
            )
        route = route_of(experts_buk, self._number, ranks, kernels, kept_buk, host_knows=host_knows)
        return lambda: self.experts(x_buh, weights_buk, route)

    def _shared(self, x_buh: Tensor) -> Tensor:
        assert self.shared_experts is not None
        y_buh: Tensor = self.shared_experts(x_buh)
        if self.shared_gate is None:
            return y_buh
        gate_bu1: Tensor = self.shared_gate(x_buh).sigmoid()
        return gate_bu1 * y_buh


def _site_of_shared(site: Site) -> Site:
    """Return the site of shared experts: if all of a mixture is computed again, so are they."""
    again = site.recomputation
    if "moe" not in again.parts:
        return site
    return replace(site, recomputation=replace(again, parts=again.parts - {"mlp_act"}))


class _TwoLayers(nn.Module):
    """The MLPs of all experts; a separate module, which gives the parameters their names."""

    def __init__(
        self,
        settings: ExpertSettings,
        h: int,
        activation: Activation,
        site: Site,
        *,
        bias: bool,
    ) -> None:
        super().__init__()
        experts, f = settings.num_experts, settings.moe_ffn_hidden_size
        fused = 1 + is_gated(activation)
        self.linear_fc1 = GroupedLinear(
            experts, h, f * fused, "spreads", site, fused=fused, bias=bias
        )
        self.linear_fc2 = GroupedLinear(experts, f, h, "joins", site, bias=bias)
        self._kernels = site.kernels
        self._activation = function_of(activation, site.kernels)
        parts = site.recomputation.parts
        self._forgets_active = "moe_act" in parts and "moe" not in parts

    def forward(self, x_buh: Tensor, weights_buk: Tensor, route: Route) -> Tensor:
        inner_z = self.linear_fc1(x_buh, route)
        if self.linear_fc1.bias is not None:
            bias_ei = self.linear_fc1.bias.view(self.linear_fc1.experts, -1)
            inner_z = with_biases(inner_z, bias_ei, route.ends.to(inner_z.device), self._kernels)
        weights_c = apply(_BroughtWeights, weights_buk, route)

        def weighted(inner: Tensor) -> Tensor:
            return self._kernels.weighted(inner, weights_c, route.choices, self._activation)

        weighted_zf = weighted(inner_z)
        forgets = self._forgets_active
        with forgotten(weighted, inner_z, weighted_zf) if forgets else nullcontext():
            y_buh: Tensor = self.linear_fc2(weighted_zf, route)
        return y_buh


class _BroughtWeights(torch.autograd.Function):
    """The weights that come to this rank, given the weights of its own tokens' choices."""

    @staticmethod
    def forward(ctx: Any, weights_buk: Tensor, route: Route) -> Tensor:
        tensors, ctx.route_of = route.taken_apart()
        ctx.save_for_backward(*tensors)
        return route.bring_weights(weights_buk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_c: Tensor) -> tuple[Tensor | None, ...]:
        route: Route = ctx.route_of(*ctx.saved_tensors)
        return route.return_weights(grad_c.contiguous()), None
