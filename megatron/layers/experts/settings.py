"""The settings of a mixture of experts: its sizes, its router and its balance."""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch

from megatron.flags.declare import derived, flag
from megatron.flags.ranges import COUNT, FACTOR, PROBABILITY, SHARE, WEIGHT, WIDTH, Range
from megatron.layers.experts.balance import LOSS_NAMES, Balance
from megatron.layers.experts.capacity import Capacity, DropPolicy
from megatron.layers.patterns import LayerPattern
from megatron.layers.settings import PATTERN

Score: TypeAlias = Literal["softmax", "sigmoid"]
"""Of an expert: by a softmax over all experts, or by its own sigmoid."""

_EXPERTS: Final = "--num-experts"

SHARED_EXPERT: Final = "--moe-shared-expert-intermediate-size"
"""The flag of the width of an expert that all tokens pass."""


@dataclass(frozen=True)
class BalanceSettings:
    """How the experts of a layer get equally many tokens."""

    # fmt: off
    moe_router_load_balancing_type: tuple[Balance, ...] = flag(("aux_loss",),
        "What balances the experts. A loss with --moe-aux-loss-coeff that compares the tokens of a "
        "microbatch (aux_loss), of every sequence (seq_aux_loss) or of the global batch so far "
        "(global_aux_loss); several losses may stand together. sinkhorn: training balances the "
        "choices themselves. none: nothing, or only --moe-router-enable-expert-bias.",
        idle_without=_EXPERTS)
    moe_aux_loss_coeff: tuple[float, ...] = flag((0.0,),
        "Coefficient of the balancing loss; of several losses, one for each.", WEIGHT,
        idle_without=_EXPERTS)
    moe_z_loss_coeff: float = flag(0.0,
        "Coefficient of the router's mean squared log-partition, which keeps its logits small.",
        WEIGHT, idle_without=_EXPERTS)
    moe_router_enable_expert_bias: bool = flag(False,
        "A bias of every expert joins the scores for the choice, not for the weights; after every "
        "iteration it grows for experts with few tokens and shrinks for the others.",
        idle_without=_EXPERTS)
    moe_router_bias_update_rate: float = flag(1e-3,
        "Change of an expert's bias after an iteration.", PROBABILITY,
        idle_without="--moe-router-enable-expert-bias")
    moe_router_force_load_balancing: bool = flag(False,
        "For benchmarks: random logits take the place of the router's, so that all experts have "
        "about equally many tokens.", idle_without=_EXPERTS)
    moe_input_jitter_eps: float = flag(0.0,
        "In training the router's input is multiplied by uniform noise between 1 - EPS and "
        "1 + EPS.", SHARE, metavar="EPS", idle_without=_EXPERTS)
    moe_expert_capacity_factor: float | None = flag(None,
        "An expert takes this many times the mean number of tokens of an expert in a microbatch; "
        "choices beyond that add nothing.", Range(0.01, 1e4), unset="no limit",
        idle_without=_EXPERTS)
    moe_token_drop_policy: DropPolicy = flag("probs",
        "Which choices a full expert keeps: those with the largest weights, or the first ones "
        "(position).", idle_without="--moe-expert-capacity-factor")
    # fmt: on

    @property
    def is_by_sinkhorn(self) -> bool:
        """Whether training balances the choices themselves."""
        return "sinkhorn" in self.moe_router_load_balancing_type

    @property
    def coefficients(self) -> tuple[tuple[Balance, float], ...]:
        """What balances the experts, each with its coefficient."""
        kinds, numbers = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        return tuple(zip(kinds, numbers if len(numbers) > 1 else numbers * len(kinds), strict=True))

    @property
    def losses(self) -> dict[Balance, float]:
        """The balancing losses with their coefficients."""
        return {kind: factor for kind, factor in self.coefficients if kind in LOSS_NAMES and factor}

    @property
    def capacity(self) -> Capacity | None:
        """How many tokens an expert takes; ``None``: all that choose it."""
        factor = self.moe_expert_capacity_factor
        return None if factor is None else Capacity(factor, self.moe_token_drop_policy)


@dataclass(frozen=True)
class ExpertSettings:
    """A mixture of experts in the place of the MLP."""

    # fmt: off
    num_experts: int = flag(0,
        "Experts of a layer, each an MLP; a router sends every token to --moe-router-topk of them.",
        Range(1, WIDTH.most, or_zero=True), unset="no layer has experts")
    moe_layer_freq: LayerPattern = flag(LayerPattern(every=1),
        "Every N-th layer has experts, the first one of each N; or a list with 1 for each layer "
        "that has them, as in '[0]*3+[1]*58'.", metavar=PATTERN, reads=LayerPattern.read,
        idle_without=_EXPERTS)
    moe_ffn_hidden_size: int = derived("Width of an expert.", WIDTH, unset="--ffn-hidden-size",
        idle_without=_EXPERTS)
    moe_router_topk: int = flag(2, "Experts of a token.", COUNT, idle_without=_EXPERTS)
    moe_router_score_function: Score = flag("softmax",
        "A token's score of an expert: by a softmax over all experts, or by its own sigmoid.",
        idle_without=_EXPERTS)
    moe_router_pre_softmax: bool = flag(False,
        "The softmax is over all experts, not over those that the token has chosen.",
        idle_without=_EXPERTS, idle_with="--moe-router-score-function sigmoid")
    moe_router_num_groups: int | None = flag(None,
        "Groups of experts; a token chooses from the best --moe-router-group-topk of them.", COUNT,
        unset="one group", idle_without=_EXPERTS, needs="--moe-router-group-topk")
    moe_router_group_topk: int | None = flag(None, "Groups that a token may choose from.", COUNT,
        unset="all of them", idle_without=_EXPERTS, needs="--moe-router-num-groups")
    moe_router_group_best: int | None = flag(None,
        "Best experts of a group whose scores together are the group's; DeepSeek-V2 has 1.", COUNT,
        unset="--moe-router-topk / --moe-router-group-topk", idle_without=_EXPERTS,
        needs="--moe-router-group-topk")
    moe_router_topk_scaling_factor: float = flag(1.0, "Factor of the weights of chosen experts.",
        FACTOR, idle_without=_EXPERTS)
    moe_router_dtype: Literal["fp32", "fp64"] | None = flag(None,
        "Type of the router's product; with fp64 its scores and losses are in fp64, too.",
        unset="the type of activations", idle_without=_EXPERTS)
    moe_shared_expert_intermediate_size: int = flag(0, "Width of an expert that all tokens pass.",
        Range(1, WIDTH.most, or_zero=True), unset="there is none", idle_without=_EXPERTS)
    moe_shared_expert_gate: bool = flag(False,
        "A sigmoid of the token multiplies the output of the shared expert.", idle_without=_EXPERTS,
        needs=SHARED_EXPERT)
    # fmt: on

    @property
    def is_mixture(self) -> bool:
        """Whether tokens choose experts: one expert would be the same layer for all of them."""
        return self.num_experts > 1

    def in_layer(self, layer: int) -> bool:
        """Return whether a layer has experts in the place of its MLP.

        Args:
            layer: index in the whole model, from 0.
        """
        return self.is_mixture and bool(self.moe_layer_freq.entry(layer, first=True))

    @property
    def dtype(self) -> torch.dtype | None:
        """Type of the router's product, if it may be wider than activations."""
        dtypes = {"fp32": torch.float32, "fp64": torch.float64}
        return None if self.moe_router_dtype is None else dtypes[self.moe_router_dtype]
