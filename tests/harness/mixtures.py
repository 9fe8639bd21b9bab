"""Mixtures of experts for tests of single layers: their two nodes of settings, made by name."""

from dataclasses import dataclass
from typing import Any

from megatron.flags.tree import changed, made
from megatron.layers.experts.experts import Experts
from megatron.layers.experts.router import Router
from megatron.layers.experts.settings import BalanceSettings, ExpertSettings, Score
from megatron.layers.site import Site


@dataclass(frozen=True)
class Mixture:
    """How the tokens of a layer choose experts, and what balances the experts."""

    experts: ExpertSettings
    balance: BalanceSettings

    def but(self, **values: Any) -> "Mixture":
        """Return the mixture with other values, by name."""
        return changed(self, **values)

    def router(self, hidden_size: int, site: Site) -> Router:
        return Router(self.experts, self.balance, hidden_size, site)

    def layer(self, hidden_size: int, site: Site, *, bias: bool = False) -> Experts:
        """Return the layer, whose experts are gated by SiLU."""
        return Experts(self.experts, self.balance, hidden_size, "swiglu", site, bias=bias)


def mixture(experts: int, topk: int, score: Score = "softmax", **values: Any) -> Mixture:
    """Return a mixture; ``values`` are further fields of its nodes."""
    given = {"num_experts": experts, "moe_router_topk": topk, "moe_router_score_function": score}
    return made(Mixture, given | values)


def balanced(*kinds: tuple[str, float], z_loss: float = 0.0) -> dict[str, Any]:
    """Return the fields that say what balances experts: kinds with their coefficients."""
    names, factors = zip(*kinds, strict=True)
    return {
        "moe_router_load_balancing_type": names,
        "moe_aux_loss_coeff": factors,
        "moe_z_loss_coeff": z_loss,
    }
