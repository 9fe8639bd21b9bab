"""Main gradients: what autograd leaves in them, and what memory they share."""

import pytest
import torch
from torch import nn

from megatron.kernels.choose import kernels_for
from megatron.layers.main_grad import main_grad_of
from megatron.optimizer.main_gradients import MainGradients

CPU = torch.device("cpu")


def microbatches(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 8, generator=generator).to(dtype) for _ in range(3)]


def linear(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 4, dtype=dtype)


def backward_all(layer: nn.Linear, inputs: list[torch.Tensor]) -> None:
    for x_nh in inputs:
        layer(x_nh).square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_shares_the_gradient(dtype: torch.dtype) -> None:
    layer, reference = linear(dtype), linear(dtype)
    MainGradients([list(layer.parameters())], kernels_for(CPU, layer.weight.dtype))
    backward_all(layer, microbatches(dtype))
    backward_all(reference, microbatches(dtype))
    for ours, theirs in zip(layer.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert main_grad_of(ours).data_ptr() == ours.grad.data_ptr()
        assert main_grad_of(ours).dtype == dtype
        torch.testing.assert_close(main_grad_of(ours), theirs.grad, rtol=0, atol=0)


def test_bf16_sums_in_fp32_and_frees_the_bf16_gradient() -> None:
    layer = linear(torch.bfloat16)
    MainGradients([list(layer.parameters())], kernels_for(CPU, layer.weight.dtype))
    expected = [torch.zeros(p.shape) for p in layer.parameters()]
    for x_nh in microbatches(torch.bfloat16):
        reference = linear(torch.bfloat16)
        backward_all(reference, [x_nh])
        for total, parameter in zip(expected, reference.parameters(), strict=True):
            assert parameter.grad is not None
            total += parameter.grad.float()
        backward_all(layer, [x_nh])
    for parameter, total in zip(layer.parameters(), expected, strict=True):
        assert parameter.grad is None
        assert main_grad_of(parameter).dtype == torch.float32
        torch.testing.assert_close(main_grad_of(parameter), total, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_zero_starts_a_new_sum_in_the_same_memory(dtype: torch.dtype) -> None:
    layer = linear(dtype)
    gradients = MainGradients([list(layer.parameters())], kernels_for(CPU, layer.weight.dtype))
    address = main_grad_of(layer.weight).data_ptr()
    backward_all(layer, microbatches(dtype))
    first = main_grad_of(layer.weight).clone()
    gradients.zero()
    assert main_grad_of(layer.weight).count_nonzero() == 0
    backward_all(layer, microbatches(dtype))
    torch.testing.assert_close(main_grad_of(layer.weight), first, rtol=0, atol=0)
    assert main_grad_of(layer.weight).data_ptr() == address
