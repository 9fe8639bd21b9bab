"""The choices of a router beside plain ones and beside Megatron-Core's, and its random numbers."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from harness.megatron_core import core_on_cpu, needs_core
from harness.mixtures import Mixture, balanced, mixture
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import plain_experts
from reference.plain_gpt import GPTOptions

from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.layers.dropout import DropoutSeeds
from megatron.layers.experts.balance import Balance
from megatron.layers.experts.capacity import Capacity, DropPolicy
from megatron.layers.experts.router import Choice, Router, choose
from megatron.layers.experts.settings import Score
from megatron.layers.forward_pass import PLAIN_PASS, ForwardPass
from megatron.layers.left_losses import LayerLosses
from megatron.layers.site import Site

SITE = Site(torch.device("cpu"), torch.float64, given_kernels=ReferenceKernels())
TRAINING = ForwardPass(DropoutSeeds(1, 2, 3, 4))
BALANCED_BY_SINKHORN = balanced(("sinkhorn", 0.0))


def dense(choice: Choice, experts: int) -> torch.Tensor:
    """The weight of every expert for every token."""
    shape = (*choice.experts_buk.shape[:2], experts)
    weights_bue = torch.zeros(shape, dtype=choice.weights_buk.dtype)
    return weights_bue.scatter(-1, choice.experts_buk, choice.weights_buk)


def router(settings: Mixture, hidden: int = 8) -> Router:
    made = settings.router(hidden, SITE)
    with torch.no_grad():
        made.weight.copy_(torch.eye(hidden, dtype=torch.float64)[: settings.experts.num_experts])
    return made


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


NARROW = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("narrow", NARROW, ids=str)
def test_a_router_in_fp64_is_exact_up_to_the_rounding_of_its_results(
    narrow: torch.dtype, score: Score
) -> None:
    """Weights are rounded to fp32, gradients to the type of what they are of."""
    balance = balanced(("seq_aux_loss", 0.5), z_loss=0.25)
    options = mixture(8, 3, score, moe_router_dtype="fp64", **balance)
    found = scored(options, narrow)
    wanted = scored(options, torch.float64)
    wide = scored(options.but(moe_router_dtype="fp32"), narrow)
    rounded = [own.to(other.dtype) for own, other in zip(wanted, found, strict=True)]
    assert [own.dtype for own in found] == [torch.float32, narrow, narrow, torch.float64]
    assert all(own.equal(other) for own, other in zip(found, rounded, strict=True))
    assert not wide[0].equal(rounded[0]), "fp32 is not enough"


def scored(options: Mixture, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Weights, gradients of input and matrix, and losses of a router with factors of a type."""
    x_buh, weight_eh = numbers(2, 30, 64).to(torch.bfloat16), numbers(8, 64, seed=1)
    made = options.router(64, replace(SITE, dtype=dtype))
    with torch.no_grad():
        made.weight.copy_(weight_eh.to(torch.bfloat16))
    x_buh = x_buh.to(dtype).requires_grad_()
    losses = LayerLosses()
    choice = made(x_buh, replace(TRAINING, losses=losses))
    left = torch.stack([own.loss for own in losses.close()[0]])
    grad_buk = numbers(*choice.weights_buk.shape, seed=2).to(torch.bfloat16)
    ((choice.weights_buk * grad_buk).sum() + left.sum()).backward()
    assert x_buh.grad is not None
    assert made.weight.grad is not None
    return choice.weights_buk.detach(), x_buh.grad, made.weight.grad, left.detach()


def test_a_router_in_fp64_tells_logits_apart_that_fp32_cannot() -> None:
    options = mixture(2, 1, "sigmoid", moe_router_dtype="fp64")
    made = options.router(3, replace(SITE, dtype=torch.float32))
    with torch.no_grad():
        made.weight.copy_(torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.5, 0.0]]))
    for large in (1e8, -1e8):
        choice = made(torch.tensor([[[large, 1.0, -large]]]), PLAIN_PASS)
        assert choice.experts_buk.item() == 0
        assert choice.weights_buk.item() == pytest.approx(torch.sigmoid(torch.ones(())).item())


@pytest.mark.parametrize("groups", [1, 4])
def test_a_bias_joins_the_choice_and_no_weight(groups: int) -> None:
    values: dict[str, Any] = {
        "moe_router_num_groups": groups,
        "moe_router_group_topk": min(groups, 2),
        "moe_router_topk_scaling_factor": 2.5,
    }
    options = mixture(8, 4, "sigmoid", **values).experts
    written = GPTOptions(
        num_experts=8, moe_router_topk=4, moe_router_score_function="sigmoid", **values
    )
    logits_bue, bias_e = numbers(3, 50, 8), 0.3 * numbers(8, seed=1)
    found = dense(choose(logits_bue, options, bias_e), 8)
    torch.testing.assert_close(found, plain_experts.weights(logits_bue, written, bias_e))
    assert not torch.equal(found, plain_experts.weights(logits_bue, written)), "it decides"


@settings(deadline=None, max_examples=60)
@given(
    samples=st.integers(1, 3),
    length=st.integers(1, 9),
    topk=st.integers(1, 3),
    factor=st.sampled_from([0.2, 0.5, 1.0, 1.25, 9.0]),
    policy=st.sampled_from(["probs", "position"]),
    seed=st.integers(0, 99),
)
def test_a_full_expert_keeps_as_many_as_the_plain_one(
    samples: int, length: int, topk: int, factor: float, policy: DropPolicy, seed: int
) -> None:
    logits_bue = numbers(samples, length, 4, seed=seed)
    choice = choose(logits_bue, mixture(4, topk, "sigmoid").experts)
    kept_buk = Capacity(factor, policy).kept(choice.experts_buk, choice.weights_buk, 4, SITE)
    found = dense(Choice(choice.experts_buk, choice.weights_buk * kept_buk), 4)
    written = GPTOptions(
        num_experts=4,
        moe_router_topk=topk,
        moe_expert_capacity_factor=factor,
        moe_token_drop_policy=policy,
    )
    weights_bue = dense(choice, 4)
    torch.testing.assert_close(found, weights_bue * plain_experts.kept(weights_bue, written))


def test_a_dropped_choice_adds_nothing_and_gets_no_gradient() -> None:
    capacity = {"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "position"}
    made = router(mixture(8, 1, "sigmoid", **capacity))
    x_buh = torch.zeros(1, 16, 8, dtype=torch.float64)
    x_buh[..., 3] = 5.0  # all tokens choose one expert, which takes two
    x_buh.requires_grad_()
    choice = made(x_buh, TRAINING)
    assert (choice.weights_buk.flatten() > 0).tolist() == [True] * 2 + [False] * 14
    choice.weights_buk.sum().backward()
    assert x_buh.grad is not None
    assert x_buh.grad[0].any(-1).tolist() == [True] * 2 + [False] * 14


def test_forced_choices_are_even_and_gradients_go_back() -> None:
    made = router(mixture(8, 2, "sigmoid", moe_router_force_load_balancing=True))
    x_buh = torch.zeros(4, 500, 8, dtype=torch.float64)
    x_buh[..., 3] = 5.0
    x_buh.requires_grad_()
    losses = LayerLosses()
    choice = made(x_buh, replace(TRAINING, losses=losses))
    [load] = losses.close()[1]
    assert load.times_e.sum() == 4000
    assert load.times_e.max() < 1.15 * 500
    choice.weights_buk.square().sum().backward()
    assert x_buh.grad is not None
    assert x_buh.grad.any(-1).all()
    again = made(x_buh, replace(TRAINING, losses=LayerLosses()))
    assert torch.equal(again.experts_buk, choice.experts_buk), "seeded by the place in the run"
    assert not torch.equal(made(x_buh, PLAIN_PASS).experts_buk, choice.experts_buk)


def test_noise_multiplies_the_input_of_the_router_in_training_only() -> None:
    options = mixture(8, 8, moe_router_pre_softmax=True)
    made, plain = router(options.but(moe_input_jitter_eps=0.25)), router(options)
    x_buh = numbers(2, 30, 8)

    def logits(part: Router, forward_pass: ForwardPass) -> torch.Tensor:
        """The logarithm of a softmax is the logits, up to a number for every token."""
        found = dense(part(x_buh, forward_pass), 8).log()
        return found - found[..., :1] + x_buh[..., :1]

    assert torch.equal(logits(made, PLAIN_PASS), logits(plain, PLAIN_PASS))
    noisy = logits(made, TRAINING)
    assert torch.equal(noisy, logits(made, TRAINING)), "seeded by the place in the run"
    moved = (noisy - noisy.mean(-1, keepdim=True)) - (x_buh - x_buh.mean(-1, keepdim=True))
    assert 0.05 < moved.abs().max() / x_buh.abs().max() < 0.5


@pytest.mark.parametrize("topk", [1, 3])
def test_sinkhorn_balances_skewed_tokens(topk: int) -> None:
    made = router(mixture(8, topk, **BALANCED_BY_SINKHORN))
    x_buh = numbers(4, 100, 8) + torch.linspace(0, 3, 8, dtype=torch.float64)

    def largest(forward_pass: ForwardPass) -> float:
        losses = LayerLosses()
        made(x_buh, replace(forward_pass, losses=losses))
        [load] = losses.close()[1]
        return float(load.times_e.max() / load.times_e.double().mean())

    assert largest(PLAIN_PASS) > 1.8, "an evaluation chooses by scores alone"
    assert largest(TRAINING) < 1.3


@pytest.mark.parametrize("wrong", [float("nan"), 100.0])
def test_scaling_ends_whatever_the_logits_are(wrong: float) -> None:
    made = router(mixture(8, 1, **BALANCED_BY_SINKHORN))
    x_buh = numbers(1, 50, 8)
    x_buh[0, :25, 3] = wrong
    chosen_buk = made(x_buh, TRAINING).experts_buk
    assert ((chosen_buk >= 0) & (chosen_buk < 8)).all()


def core() -> Any:
    needs_core()
    with core_on_cpu():
        return import_module("megatron.core.transformer.moe.moe_utils")


@pytest.mark.parametrize("groups", [None, 4])
@pytest.mark.parametrize(
    ("score", "pre_softmax", "bias"),
    [("softmax", False, False), ("softmax", True, False), ("sigmoid", False, True)],
)
def test_choices_are_those_of_megatron_core(
    score: Any, pre_softmax: bool, bias: bool, groups: int | None
) -> None:
    theirs = core()
    logits_bue = numbers(1, 200, 8)
    bias_e = 0.2 * numbers(8, seed=1) if bias else None
    weights_ne, _ = theirs.topk_routing_with_score_function(
        logits_bue[0],
        4,
        use_pre_softmax=pre_softmax,
        num_groups=groups,
        group_topk=groups and 2,
        scaling_factor=2.5,
        score_function=score,
        expert_bias=bias_e,
    )
    options = mixture(
        8,
        4,
        score,
        moe_router_pre_softmax=pre_softmax,
        moe_router_num_groups=groups,
        moe_router_group_topk=groups and 2,
        moe_router_topk_scaling_factor=2.5,
    )
    found = dense(choose(logits_bue, options.experts, bias_e), 8)[0]
    torch.testing.assert_close(found, weights_ne, rtol=1e-5, atol=1e-6)  # theirs is in fp32


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
def test_losses_are_those_of_megatron_core(score: Any, kind: Balance) -> None:
    theirs = core()
    x_buh = numbers(2, 30, 8)
    made = router(mixture(8, 2, score, **balanced((kind, 0.5), z_loss=0.25)))
    losses = LayerLosses()
    made(x_buh, replace(TRAINING, losses=losses))
    balance, squares = losses.close()[0]
    logits_ne = x_buh.flatten(0, 1)
    assert squares.loss.item() == pytest.approx(theirs.z_loss_func(logits_ne, 0.25).item())
    map_ne, scores_ne = theirs.compute_routing_scores_for_aux_loss(logits_ne, 2, score)

    def loss(of: slice) -> float:
        chosen_ne = map_ne[of]
        return float(
            theirs.switch_load_balancing_loss_func(
                scores_ne[of], chosen_ne.sum(0), len(chosen_ne), 2, 8, 0.5
            )
        )

    if kind == "aux_loss":
        expected = loss(slice(None))
    else:
        expected = (loss(slice(0, 30)) + loss(slice(30, 60))) / 2
    assert balance.loss.item() == pytest.approx(expected, rel=1e-5)
    assert balance.value.item() == pytest.approx(2 * expected, rel=1e-5), "without coefficient"


def test_choices_by_sinkhorn_are_those_of_megatron_core() -> None:
    theirs = core()
    x_buh = numbers(1, 200, 8)
    made = router(mixture(8, 1, **BALANCED_BY_SINKHORN))
    expected = theirs.sinkhorn(x_buh[0]).argmax(1)
    assert torch.equal(made(x_buh, TRAINING).experts_buk.flatten(), expected)


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_dropped_choices_are_those_of_megatron_core(factor: float) -> None:
    theirs = core()
    x_buh = numbers(1, 60, 8)
    plain = choose(x_buh, mixture(8, 2, "sigmoid").experts)
    weights_ne = dense(plain, 8)[0]
    expected, _ = theirs.apply_router_token_dropping(weights_ne, weights_ne > 0, 2, factor)
    made = router(mixture(8, 2, "sigmoid", moe_expert_capacity_factor=factor))
    torch.testing.assert_close(dense(made(x_buh, TRAINING), 8)[0], expected)
