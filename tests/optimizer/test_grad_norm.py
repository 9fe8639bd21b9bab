"""The gradient norm against float64, and the clip coefficient against PyTorch's clipping."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron.kernels.choose import kernels_for
from megatron.kernels.reference.optimizer import BLOCK_ELEMENTS
from megatron.model.ownership import OwnedParameter
from megatron.optimizer.bucket import Bucket
from megatron.optimizer.grad_norm import clip_coefficient, local_sum_of_squares
from megatron.optimizer.parameters import ParameterPart

CPU = torch.device("cpu")
KERNELS = kernels_for(CPU, torch.float32)


def part(grad: torch.Tensor, counts_in_norm: bool = True) -> ParameterPart:
    parameter = nn.Parameter(torch.zeros_like(grad))
    owned = OwnedParameter.whole("weight", parameter)
    entry = replace(owned, is_copy=not counts_in_norm)
    Bucket([entry], kernels_for(CPU, grad.dtype)).gradients.copy_(grad.flatten())
    return ParameterPart.whole(entry)


@pytest.mark.parametrize(
    "shape", [(3,), (BLOCK_ELEMENTS,), (BLOCK_ELEMENTS + 1,), (1000, 1000), (2, 3 * BLOCK_ELEMENTS)]
)
def test_equals_the_float64_sum(shape: tuple[int, ...]) -> None:
    grad = torch.randn(shape) * 1e-3
    expected = grad.double().square().sum()
    total = local_sum_of_squares([part(grad)], KERNELS, CPU)
    assert total.dtype == torch.float64
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)


def test_stays_exact_where_one_fp32_sum_would_not() -> None:
    grad = torch.full((1 << 24,), 0.1)
    expected = grad[0].double().square() * grad.numel()
    torch.testing.assert_close(
        local_sum_of_squares([part(grad)], KERNELS, CPU), expected, rtol=1e-5, atol=0
    )


def test_a_copy_that_does_not_count_is_left_out() -> None:
    counted, copy = torch.randn(10), torch.randn(10)
    total = local_sum_of_squares([part(counted), part(copy, counts_in_norm=False)], KERNELS, CPU)
    torch.testing.assert_close(total, counted.double().square().sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_entry_reaches_the_norm(bad: float) -> None:
    grad = torch.ones(2 * BLOCK_ELEMENTS)
    grad[BLOCK_ELEMENTS + 7] = bad
    assert not torch.isfinite(local_sum_of_squares([part(grad)], KERNELS, CPU))


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_clips_as_pytorch_does(scale: float) -> None:
    parameter = nn.Parameter(torch.zeros(50))
    parameter.grad = torch.randn(50) * scale
    before = parameter.grad.clone()
    norm = nn.utils.clip_grad_norm_([parameter], 2.0)
    torch.testing.assert_close(before * clip_coefficient(float(norm), 2.0), parameter.grad)


def test_no_limit_means_no_clipping() -> None:
    assert clip_coefficient(1e9, 0.0) == 1.0
