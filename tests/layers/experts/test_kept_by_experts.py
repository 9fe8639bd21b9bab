"""What a mixture keeps for its backward, and what the backward computes again."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.mixtures import mixture
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.layers.experts.wide_linear import wide_linear
from megatron.layers.recompute import NO_RECOMPUTATION, Part, Recomputation
from megatron.layers.site import Site


class CountedCalls(ReferenceKernels):
    """Notes how often the experts' kernels are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def grouped_product(self, x_si: Tensor, weight_gio: Tensor, ends_g: Tensor) -> Tensor:
        self.calls["product"] += 1
        return super().grouped_product(x_si, weight_gio, ends_g)

    def weighted(
        self,
        inner_ri: Tensor,
        weights_c: Tensor,
        choice_r: Tensor,
        activation: Callable[[Tensor], Tensor],
    ) -> Tensor:
        self.calls["activation"] += 1
        return super().weighted(inner_ri, weights_c, choice_r, activation)


def keeping() -> tuple[list[Tensor], saved_tensors_hooks]:
    """A list of tensors, and a context that adds to it what is kept for the backward."""
    kept: list[Tensor] = []

    def keep(each: Tensor) -> Tensor:
        kept.append(each)
        return each

    return kept, saved_tensors_hooks(keep, lambda each: each)


def trained(recomputation: Recomputation) -> tuple[Counter[str], int, list[Tensor]]:
    """Calls in the backward of a mixture, numbers kept of activations, and gradients."""
    kernels = CountedCalls()
    site = Site(
        torch.device("cpu"),
        torch.float64,
        given_kernels=kernels,
        recomputation=recomputation,
    )
    shared: dict[str, Any] = {
        "moe_shared_expert_intermediate_size": 4,
        "moe_shared_expert_gate": True,
    }
    made = mixture(4, 2, moe_ffn_hidden_size=6, **shared).layer(8, site)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(generator=generator)
    x_buh = torch.randn(2, 5, 8, generator=generator, dtype=torch.float64).requires_grad_()
    kept, hooks = keeping()
    with hooks:
        y_buh = made(x_buh)
    kernels.calls.clear()
    y_buh.square().sum().backward()
    slots = sum(each.numel() for each in kept if each.shape == (20, 6))
    gradients = [each.grad for each in (x_buh, *made.parameters())]
    return kernels.calls, slots, [each for each in gradients if each is not None]


@pytest.mark.parametrize(
    ("part", "again"),
    [("moe", {"product": 1, "activation": 1}), ("moe_act", {"activation": 1})],
)
def test_only_what_is_needed_is_computed_again(part: Part, again: dict[str, int]) -> None:
    """The experts' last product is not, since nothing behind it is kept."""
    plain, _, wanted = trained(NO_RECOMPUTATION)
    calls, _, gradients = trained(Recomputation(frozenset((part,))))
    assert plain == {"product": 2}, "the gradients of both layers' inputs"
    assert calls - plain == Counter(again)
    for own, want in zip(gradients, wanted, strict=True):
        assert torch.equal(own, want)


def test_no_activation_is_kept_that_is_computed_again() -> None:
    assert trained(NO_RECOMPUTATION)[1] == 20 * 6
    assert trained(Recomputation(frozenset(("moe_act",))))[1] == 0


def test_a_wide_product_keeps_narrow_factors() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight_oi = (
        torch.randn(shape, generator=generator).bfloat16().requires_grad_()
        for shape in ((2, 3, 8), (4, 8))
    )
    kept, hooks = keeping()
    with hooks:
        own = wide_linear(x, weight_oi, torch.float32, ReferenceKernels())
    assert {each.dtype for each in kept} == {torch.bfloat16}
    want = torch.nn.functional.linear(x.float(), weight_oi.float())
    grad: Any = torch.randn(own.shape, generator=generator)
    assert torch.equal(own, want)
    for left, right in zip(
        torch.autograd.grad(own, (x, weight_oi), grad),
        torch.autograd.grad(want, (x, weight_oi), grad),
        strict=True,
    ):
        assert torch.equal(left, right)
