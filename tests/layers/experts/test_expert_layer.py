"""What a mixture of experts promises besides its formula, which ``correctness`` compares."""

from typing import Any

import pytest
import torch
from harness.mixtures import Mixture, balanced, mixture
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import plain_experts
from reference.plain_gpt import GPTOptions

from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.layers.experts.experts import Experts
from megatron.layers.experts.order import Order, times_chosen
from megatron.layers.experts.router import choose
from megatron.layers.experts.settings import Score
from megatron.layers.forward_pass import ForwardPass
from megatron.layers.left_losses import LayerLosses
from megatron.layers.main_grad import main_grad_of
from megatron.layers.site import Site
from megatron.layers.weight_gradients import defer_weight_gradients
from megatron.model.ownership import owned_by
from megatron.optimizer.bucket import Bucket

SITE = Site(torch.device("cpu"), torch.float64, given_kernels=ReferenceKernels())


def layer_of(settings: Mixture, seed: int = 0, *, gate: bool = False) -> Experts:
    shared = 4 if gate else 0
    widths = {"moe_ffn_hidden_size": 6, "moe_shared_expert_intermediate_size": shared}
    made = settings.but(**widths, moe_shared_expert_gate=gate).layer(8, SITE)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(generator=generator)
    return made


def tokens(*, batch: int = 2, length: int = 7, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, 8, generator=generator, dtype=torch.float64)


@settings(deadline=None, max_examples=60)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 6),
    topk=st.integers(1, 4),
    experts=st.integers(4, 7),
    seed=st.integers(0, 99),
)
def test_an_order_has_every_choice_once_and_experts_in_a_row(
    batch: int, length: int, topk: int, experts: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(batch, length, experts, generator=generator)
    chosen_bsk = scores.topk(topk).indices
    order = Order.by_expert(chosen_bsk, experts, ReferenceKernels())
    assert order.choice_z.sort().values.tolist() == list(range(batch * length * topk))
    assert order.slot_bsk.flatten()[order.choice_z].tolist() == list(range(batch * length * topk))
    in_slots = chosen_bsk.flatten()[order.choice_z]
    assert in_slots.tolist() == sorted(in_slots.tolist())
    begins = [0, *order.ends.tolist()]
    for expert in range(experts):
        own = in_slots[begins[expert] : begins[expert + 1]]
        assert (own == expert).all()
    assert times_chosen(chosen_bsk.flatten(), experts).sum() == batch * length * topk


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 99), topk=st.integers(1, 3))
def test_joining_is_the_adjoint_of_spreading(seed: int, topk: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    chosen_bsk = torch.rand(2, 5, 4, generator=generator).topk(topk).indices
    kernels = ReferenceKernels()
    order = Order.by_expert(chosen_bsk, 4, kernels)
    x_bsh = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64)
    y_zh = torch.randn(10 * topk, 3, generator=generator, dtype=torch.float64)
    left, right = (
        (order.spread(x_bsh, kernels) * y_zh).sum(),
        (x_bsh * order.join(y_zh, kernels)).sum(),
    )
    assert left.item() == pytest.approx(right.item(), rel=1e-12)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("pre_softmax", [False, True])
@pytest.mark.parametrize("topk", [2, 4])
def test_a_choice_is_that_of_the_formula(
    score: Score, groups: int, pre_softmax: bool, topk: int
) -> None:
    values: dict[str, Any] = {
        "moe_router_pre_softmax": pre_softmax,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": min(groups, 2),
        "moe_router_topk_scaling_factor": 1.5,
    }
    options = mixture(8, topk, score, **values).experts
    written = GPTOptions(
        num_experts=8, moe_router_topk=topk, moe_router_score_function=score, **values
    )
    logits_bue = torch.randn(3, 50, 8, dtype=torch.float64, requires_grad=True)
    choice = choose(logits_bue, options)
    dense_bue = torch.zeros_like(logits_bue).scatter(-1, choice.experts_buk, choice.weights_buk)
    torch.testing.assert_close(dense_bue, plain_experts.weights(logits_bue, written))


def test_all_tokens_may_choose_one_expert_and_the_others_have_no_gradient() -> None:
    made = layer_of(mixture(4, 1))
    with torch.no_grad():
        made.router.weight.zero_()
        made.router.weight[2, 0] = 1.0
    x_buh = tokens()
    x_buh[..., 0] = 5.0
    made(x_buh).square().sum().backward()
    for layer in (made.experts.linear_fc1, made.experts.linear_fc2):
        gradient = layer.weight.grad
        assert gradient is not None
        norms = gradient.unflatten(0, (4, -1)).flatten(1).norm(dim=1)
        assert norms[2] > 0
        assert norms[[0, 1, 3]].tolist() == [0, 0, 0]


def test_the_balancing_loss_is_least_where_experts_have_equally_many_tokens() -> None:
    made = layer_of(mixture(4, 1, **balanced(("aux_loss", 0.5))))

    def loss(logits_for: torch.Tensor) -> float:
        with torch.no_grad():
            made.router.weight.zero_()
            made.router.weight[:, :4] = torch.eye(4)
        x_buh = torch.zeros(1, 8, 8, dtype=torch.float64)
        x_buh[0, torch.arange(8), logits_for] = 30.0
        losses = LayerLosses()
        made(x_buh, ForwardPass(losses=losses))
        [left], _ = losses.close()
        return left.loss.item()

    assert loss(torch.arange(8) % 4) == pytest.approx(0.5)
    assert loss(torch.zeros(8, dtype=torch.int64)) == pytest.approx(0.5 * 4)


@pytest.mark.parametrize("gate", [False, True])
def test_weight_gradients_that_wait_are_those_of_a_whole_backward(gate: bool) -> None:
    router = mixture(4, 2, "sigmoid", moe_router_topk_scaling_factor=2.0)
    whole, split = layer_of(router, gate=gate), layer_of(router, gate=gate)
    kernels = ReferenceKernels()
    for made in (whole, split):
        entries = list(owned_by(made, "x."))
        Bucket(entries, kernels, gradient_dtype=torch.float64)
    work: list[object] = []
    defer_weight_gradients(split, work.append)
    for made in (whole, split):
        made(tokens()).square().sum().backward()
    assert work, "nothing waits"
    for each in work:
        assert callable(each)
        each()
    for (name, one), other in zip(whole.named_parameters(), split.parameters(), strict=True):
        assert torch.equal(main_grad_of(one), main_grad_of(other)), name
        assert main_grad_of(one).any(), name
