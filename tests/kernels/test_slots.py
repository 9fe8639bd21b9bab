"""What ``Kernels`` promises of slots of tokens and of products of groups of them.

Each implementation is compared with a formula in float64 of the same, already rounded, numbers.
"""

import pytest
import torch
from kernels.formulas import (
    explicit_geglu,
    explicit_gelu,
    explicit_squared_relu,
    explicit_swiglu,
)
from kernels.implementations import IMPLEMENTATIONS, TOLERANCE, Implementation, relative_error
from torch import Tensor

pytestmark = pytest.mark.parametrize("tried", IMPLEMENTATIONS, ids=str)

CHOICES = [(0, 1, 2), (1, 1, 1), (5, 2, 3), (150, 2, 4), (70, 8, 33)]
"""Tokens, choices of a token, experts: also no token, more choices than a program takes, and more
experts."""

FORMULAS = {
    "gelu": explicit_gelu,
    "squared_relu": explicit_squared_relu,
    "swiglu": explicit_swiglu,
    "geglu": explicit_geglu,
}


def chosen(tried: Implementation, tokens: int, choices: int, experts: int) -> Tensor:
    """Experts of tokens; none chooses the expert in the middle if tokens can do without it."""
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, experts, generator=generator)
    if choices < experts:
        scores[:, experts // 2] = -1
    return scores.topk(choices, dim=1).indices.to(tried.device)


@pytest.mark.parametrize("sizes", CHOICES, ids=str)
def test_slots_are_sorted_by_expert_and_then_by_choice(
    tried: Implementation, sizes: tuple[int, int, int]
) -> None:
    chosen_nk = chosen(tried, *sizes)
    choice_r, slot_nk, ends_e = tried.kernels.slots_by_expert(chosen_nk, sizes[2])
    by_hand = sorted(enumerate(chosen_nk.flatten().tolist()), key=lambda each: each[1])
    assert choice_r.tolist() == [choice for choice, _ in by_hand]
    assert slot_nk.shape == chosen_nk.shape
    assert slot_nk.flatten()[choice_r].tolist() == list(range(len(by_hand)))
    experts = [expert for _, expert in by_hand]
    assert ends_e.tolist() == [
        sum(each <= expert for each in experts) for expert in range(sizes[2])
    ]
    assert (choice_r.dtype, slot_nk.dtype, ends_e.dtype) == (torch.int64, torch.int64, torch.int32)


@pytest.mark.parametrize("sizes", [(5, 2, 3), (6, 3, 4)], ids=str)
@pytest.mark.parametrize("width", [3, 1030])
def test_tokens_are_copied_into_slots_and_slots_added(
    tried: Implementation, sizes: tuple[int, int, int], width: int
) -> None:
    tokens, choices, experts = sizes
    kernels = tried.kernels
    choice_r, slot_nk, _ = kernels.slots_by_expert(chosen(tried, *sizes), experts)
    x_nh = tried.activation(tokens, width)
    spread_rh = kernels.spread(x_nh, choice_r, choices)
    assert torch.equal(spread_rh, x_nh[choice_r // choices])
    y_rh = tried.activation(tokens * choices, width, seed=1)
    sums_nh = kernels.join(y_rh, slot_nk)
    assert sums_nh.dtype == tried.dtype
    want_nkh = y_rh.double()[slot_nk]
    tried.assert_close(sums_nh, want_nkh.sum(1))
    first = tokens + 1
    some_nh = kernels.join(y_rh[:first], slot_nk)
    tried.assert_close(some_nh, (want_nkh * (slot_nk < first)[:, :, None]).sum(1))


def chosen_at_random(tried: Implementation, slots: int, choices: int) -> Tensor:
    """The choices in slots, all different."""
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(choices, generator=generator)[:slots].to(tried.device)


@pytest.mark.parametrize("name", FORMULAS)
def test_an_activation_times_the_weight_of_a_slot(tried: Implementation, name: str) -> None:
    """With a gate, some choices have no slot on this rank: their weights have the gradient 0."""
    kernels, choices = tried.kernels, 25 if "glu" in name else 18
    width = 1030 if name in ("gelu", "swiglu") else 5
    inner_ri = tried.activation(18, width * (2 if "glu" in name else 1)).requires_grad_()
    weights_c = tried.statistic(choices, seed=1).requires_grad_()
    choice_r = chosen_at_random(tried, 18, choices)
    out_rf = kernels.weighted(inner_ri, weights_c, choice_r, getattr(kernels, name))
    wide_ri, wide_c = (t.detach().double().requires_grad_() for t in (inner_ri, weights_c))
    want_rf = FORMULAS[name](wide_ri) * wide_c[choice_r, None]
    grad_rf = tried.activation(*want_rf.shape, seed=2)
    got = torch.autograd.grad(out_rf, (inner_ri, weights_c), grad_rf)
    want = torch.autograd.grad(want_rf, (wide_ri, wide_c), grad_rf.double())
    assert (out_rf.dtype, got[0].dtype, got[1].dtype) == (
        tried.dtype,
        tried.dtype,
        tried.statistics,
    )
    for own, exact in zip((out_rf, *got), (want_rf, *want), strict=True):
        assert own.shape == exact.shape
        times = 2 if tried.cuts_off or tried.name != "cuda" else 1  # the function, the product
        assert relative_error(own, exact) < times * TOLERANCE[tried.dtype]


def test_another_function_is_run_by_itself(tried: Implementation) -> None:
    kernels = tried.kernels
    inner_ri, weights_c = tried.activation(10, 6), tried.statistic(12, seed=1)
    choice_r = chosen_at_random(tried, 10, 12)
    out_rf = kernels.weighted(inner_ri, weights_c, choice_r, torch.tanh)
    tried.assert_close(out_rf, inner_ri.double().tanh() * weights_c[choice_r, None])


def test_a_product_in_a_wider_type_is_not_rounded_before(tried: Implementation) -> None:
    x_nk, weight_jk = tried.activation(7, 40), tried.activation(5, 40, seed=1)
    made_nj = tried.kernels.wide_product(x_nk, weight_jk, tried.statistics)
    assert made_nj.dtype == tried.statistics
    assert relative_error(made_nj, x_nk.double() @ weight_jk.double().T) < 1e-6


ENDS = [[3, 3, 7, 16], [0, 0, 0, 16], [16, 16, 16, 16], [0, 0, 0, 0], [130, 130, 300, 301]]
"""Ends of groups, with groups without rows, and with more rows than a program takes."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 24), (5, 3), (40, 136)])
def test_products_of_groups(
    ends: list[int], inputs: int, outputs: int, tried: Implementation
) -> None:
    """Widths that no kernel of PyTorch takes, and more columns than a program has, among them."""
    rows = ends[-1]
    x_si, weight_goi = tried.activation(rows, inputs), tried.activation(4, outputs, inputs, seed=1)
    grad_so = tried.activation(rows, outputs, seed=2)
    ends_g = torch.tensor(ends, dtype=torch.int32, device=tried.device)
    group_s = torch.bucketize(torch.arange(rows), torch.tensor(ends), right=True)
    wide_soi = weight_goi.double()[group_s.to(tried.device)]
    kernels = tried.kernels
    outputs_so = kernels.grouped_product(x_si, weight_goi.transpose(1, 2), ends_g)
    tried.assert_close(outputs_so, (wide_soi @ x_si.double()[:, :, None])[:, :, 0])
    inputs_si = kernels.grouped_product(grad_so, weight_goi, ends_g)
    tried.assert_close(inputs_si, (grad_so.double()[:, None] @ wide_soi)[:, 0])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 24), (40, 136)])
def test_weight_gradients_of_groups(
    ends: list[int], inputs: int, outputs: int, tried: Implementation
) -> None:
    rows, kernels = ends[-1], tried.kernels
    grad_so, x_si = tried.activation(rows, outputs), tried.activation(rows, inputs, seed=1)
    ends_g = torch.tensor(ends, dtype=torch.int32, device=tried.device)
    bounds = zip([0, *ends], ends, strict=False)
    want_goi = torch.stack([grad_so[a:b].double().T @ x_si[a:b].double() for a, b in bounds])
    tried.assert_close(kernels.grouped_weight_product(grad_so, x_si, ends_g), want_goi)
    total_goi = tried.statistic(4, outputs, inputs, seed=2)
    before_goi = total_goi.clone()
    kernels.accumulate_grouped_product_(total_goi, grad_so, x_si, ends_g, begins=False)
    tried.assert_close(total_goi - before_goi, want_goi)
    total_goi.fill_(torch.nan)
    kernels.accumulate_grouped_product_(total_goi, grad_so, x_si, ends_g, begins=True)
    tried.assert_close(total_goi, want_goi)
    without = [a == b for a, b in zip([0, *ends], ends, strict=False)]
    assert not total_goi[without].any(), "a group without rows"
