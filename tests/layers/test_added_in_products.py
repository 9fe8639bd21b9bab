"""Weight gradients that a kernel adds while it multiplies: the same sums, and nothing besides."""

from itertools import product

import torch
from optimizer.entries import entries
from torch import Tensor

from megatron.kernels.cpu.kernels import CpuKernels
from megatron.layers.linear import Linear
from megatron.layers.main_grad import main_grad_of
from megatron.layers.site import Site
from megatron.layers.weight_gradients import defer_weight_gradients
from megatron.optimizer.bucket import Bucket

CPU = torch.device("cpu")


class AddsItself(CpuKernels):
    """Kernels as of a GPU, which count what they add."""

    accumulates_products = True
    added = 0

    def accumulate_product_(
        self, total: Tensor, left: Tensor, right: Tensor, *, begins: bool = False
    ) -> None:
        self.added += 1
        super().accumulate_product_(total, left, right, begins=begins)


def two_microbatches(
    kernels: CpuKernels, *, split: bool, dtype: torch.dtype, forgets: bool = False
) -> Linear:
    """Return a layer that has summed its gradients over two microbatches."""
    layer = Linear(6, 4, Site(CPU, dtype, given_kernels=kernels), bias=True)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    bucket = Bucket(entries(layer.named_parameters()), kernels)
    if forgets:
        memory = bucket.gradients
        bucket.forget_gradients()
        memory.fill_(torch.nan)
    for _ in range(2):
        x = torch.randn(2, 3, 6, generator=generator).to(dtype).requires_grad_()
        grad = torch.randn(2, 3, 4, generator=generator).to(dtype)
        work: list[object] = []
        defer_weight_gradients(layer, work.append if split else None)
        layer(x).backward(grad)
        for each in work:
            assert callable(each)
            each()
    return layer


def test_sums_are_those_of_autograd_and_of_w_in_every_type() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        plain = two_microbatches(CpuKernels(), split=False, dtype=dtype)
        for split, forgets in product((False, True), repeat=2):
            kernels = AddsItself()
            layer = two_microbatches(kernels, split=split, dtype=dtype, forgets=forgets)
            assert kernels.added == 2
            for ours, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
                assert torch.equal(main_grad_of(ours), main_grad_of(theirs))


def test_without_a_sum_to_add_to_autograd_forms_the_gradient() -> None:
    kernels = AddsItself()
    layer = Linear(6, 4, Site(CPU, torch.float32, given_kernels=kernels), bias=False)
    torch.nn.init.ones_(layer.weight)
    layer(torch.ones(3, 6)).sum().backward()
    assert kernels.added == 0
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.full((4, 6), 3.0))
