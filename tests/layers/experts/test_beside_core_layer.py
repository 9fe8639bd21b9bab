"""A mixture beside the whole ``MoELayer`` of Megatron-Core, on a CPU, with the same weights.

Its router, its dispatcher ``allgather``, its loop over experts (``SequentialMLP``) and its shared
expert run without a GPU. Compared are the output, the gradients of the input and of all weights,
each with the gradients of the router's losses, and these losses.
"""

from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from correctness.agreement import errors
from harness.megatron_core import core_on_cpu, core_ranks, needs_core
from harness.mixtures import Mixture, balanced, mixture
from harness.rank_pool import RankPool
from torch import Tensor

from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.layers.dropout import DropoutSeeds
from megatron.layers.experts.experts import Experts
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.left_losses import LayerLosses
from megatron.layers.site import Site

B, S, H, F, EXPERTS = 2, 11, 16, 6, 8
SITE = Site(torch.device("cpu"), torch.float32, given_kernels=ReferenceKernels())
PLAIN = mixture(EXPERTS, 2, moe_ffn_hidden_size=F, **balanced(("aux_loss", 0.3), z_loss=0.05))


CASES = {
    "softmax": PLAIN,
    "softmax before the choice": PLAIN.but(
        moe_router_pre_softmax=True,
        moe_router_load_balancing_type=("seq_aux_loss",),
        moe_shared_expert_intermediate_size=10,
        moe_shared_expert_gate=True,
    ),
    "sigmoid": PLAIN.but(
        moe_router_topk=4,
        moe_router_score_function="sigmoid",
        moe_router_num_groups=4,
        moe_router_group_topk=2,
        moe_router_topk_scaling_factor=2.5,
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type=("aux_loss", "seq_aux_loss"),
        moe_aux_loss_coeff=(0.3, 0.2),
        moe_shared_expert_intermediate_size=10,
    ),
    "capacity": PLAIN.but(moe_expert_capacity_factor=0.75),
}

Found = dict[str, Tensor]
"""Output, losses and gradients by name."""


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ours(case: Mixture) -> Experts:
    """The mixture with random weights."""
    made = case.layer(H, SITE)
    with torch.no_grad():
        for seed, (_, weight) in enumerate(sorted(made.named_parameters())):
            weight.copy_(0.5 * numbers(*weight.shape, seed=seed))
        if made.router.expert_bias is not None:
            made.router.expert_bias.copy_(0.2 * numbers(EXPERTS, seed=99))
    return made


def by_us(made: Experts, x_bsh: Tensor, grad_bsh: Tensor) -> Found:
    losses = LayerLosses()
    y_bsh = made(x_bsh.requires_grad_(), ForwardPass(DropoutSeeds(1, 2, 3, 4), losses=losses))
    left, _ = losses.close()
    torch.autograd.backward(
        [y_bsh, *(own.loss for own in left)], [grad_bsh, *(torch.ones(()) for _ in left)]
    )
    assert x_bsh.grad is not None
    found = {"output": y_bsh.detach(), "input": x_bsh.grad}
    found |= {own.name: own.value for own in left}
    for name, weight in made.named_parameters():
        assert weight.grad is not None
        found[name] = weight.grad
    return found


def theirs(case: Mixture) -> Any:
    """The layer of Megatron-Core; its weights are not those of ``ours`` yet."""
    experts, balance = case.experts, case.balance
    kinds, factors = map(list, zip(*balance.coefficients, strict=True))
    settings = import_module("megatron.core.transformer.transformer_config").TransformerConfig(
        **{"num_layers": 1, "hidden_size": H, "ffn_hidden_size": F, "num_attention_heads": 2},
        **{"gated_linear_unit": True, "activation_func": torch.nn.functional.silu},
        **{"add_bias_linear": False, "bias_activation_fusion": False},
        **{"use_cpu_initialization": True, "gradient_accumulation_fusion": False},
        num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=F,
        moe_token_dispatcher_type="allgather",
        moe_router_topk=experts.moe_router_topk,
        moe_router_score_function=experts.moe_router_score_function,
        moe_router_pre_softmax=experts.moe_router_pre_softmax,
        moe_router_num_groups=experts.moe_router_num_groups,
        moe_router_group_topk=experts.moe_router_group_topk,
        moe_router_topk_scaling_factor=experts.moe_router_topk_scaling_factor,
        moe_router_enable_expert_bias=balance.moe_router_enable_expert_bias,
        moe_router_load_balancing_type=kinds if len(kinds) > 1 else kinds[0],
        moe_aux_loss_coeff=factors if len(kinds) > 1 else factors[0],
        moe_z_loss_coeff=balance.moe_z_loss_coeff,
        moe_expert_capacity_factor=balance.moe_expert_capacity_factor,
        moe_shared_expert_intermediate_size=experts.moe_shared_expert_intermediate_size or None,
        moe_shared_expert_gate=experts.moe_shared_expert_gate,
    )
    specs = import_module("megatron.core.models.gpt.moe_module_specs")
    spec = specs.get_moe_module_spec(use_te=False, num_experts=EXPERTS)
    build = import_module("megatron.core.transformer.spec_utils").build_module
    layer = build(spec, config=settings, layer_number=1)
    layer.set_layer_number(1)
    return layer.train()


def pairs(made: Experts, layer: Any) -> list[tuple[str, Tensor, Any]]:
    """Parts of our weights by name, and the weights of Megatron-Core that they are."""
    parts: list[tuple[str, Tensor, Any]] = []
    parts.append(("router.weight", made.router.weight, layer.router.weight))
    for name in ("linear_fc1", "linear_fc2"):
        whole = getattr(made.experts, name).weight
        matrices = [getattr(own, name).weight for own in layer.experts.local_experts]
        parts += [
            (f"experts.{name}.weight", own, matrix)
            for own, matrix in zip(whole.chunk(EXPERTS), matrices, strict=True)
        ]
        if made.shared_experts is not None:
            own, matrix = (getattr(of.shared_experts, name).weight for of in (made, layer))
            parts.append((f"shared_experts.{name}.weight", own, matrix))
    if made.shared_gate is not None:
        parts.append(
            ("shared_gate.weight", made.shared_gate.weight, layer.shared_experts.gate_weight)
        )
    return parts


def by_them(made: Experts, layer: Any, x_bsh: Tensor, grad_bsh: Tensor) -> Found:
    named = pairs(made, layer)
    assert len(named) == len(list(layer.parameters())), "no weight is left out"
    with torch.no_grad():
        for _, own, matrix in named:
            matrix.copy_(own)
        if made.router.expert_bias is not None:
            layer.router.expert_bias.copy_(made.router.expert_bias)
    utils = import_module("megatron.core.transformer.moe.moe_utils")
    tracked = utils.get_moe_layer_wise_logging_tracker()
    tracked.clear()
    x_sbh = x_bsh.transpose(0, 1).contiguous().requires_grad_()
    y_sbh, _ = layer(x_sbh)
    y_sbh.backward(grad_bsh.transpose(0, 1))
    assert x_sbh.grad is not None
    found = {"output": y_sbh.detach().transpose(0, 1), "input": x_sbh.grad.transpose(0, 1)}
    found |= {name: own["values"][0].clone() for name, own in tracked.items()}
    for name in {name for name, _, _ in named}:
        found[name] = torch.cat([matrix.grad for other, _, matrix in named if other == name])
    return found


def without_engine() -> AbstractContextManager[Any]:
    """Give the package the name that it reads, and lacks where Transformer Engine is missing."""
    utils = import_module("megatron.core.transformer.moe.moe_utils")
    return patch.object(utils, "te_general_gemm", None, create=True)


def compare(rank: int, world_size: int, *, case: str) -> tuple[Found, Found]:
    x_bsh, grad_bsh = numbers(B, S, H, seed=1), numbers(B, S, H, seed=2)
    made = ours(CASES[case])
    found = by_us(made, x_bsh.clone(), grad_bsh)
    with core_on_cpu(), core_ranks(1), torch.compiler.set_stance("force_eager"), without_engine():
        return found, by_them(made, theirs(CASES[case]), x_bsh, grad_bsh)


@pytest.mark.parametrize("case", CASES)
def test_a_mixture_is_that_of_megatron_core(case: str, ranks: RankPool) -> None:
    needs_core()
    [(found, wanted)] = ranks.run(compare, 1, case=case)
    assert max(errors(found, wanted).values()) < 1e-5
