"""Norms of an fp32 stream read it in full, and round once, at the end."""

from collections.abc import Callable

import pytest
import torch
from kernels.formulas import explicit_layer_norm, explicit_rms_norm
from kernels.implementations import CPU, relative_error
from torch import Tensor

from megatron.kernels.wide_norms import WideNorms

FORMULAS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "layer": (WideNorms.layer_norm, explicit_layer_norm),
    "rms": (WideNorms.rms_norm, explicit_rms_norm),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_are_rounded_once(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(50, 48) + 100).requires_grad_()  # in 16 bits most of it would be lost
    weight_h, bias_h = (torch.randn(48).to(dtype).requires_grad_() for _ in range(2))
    parameters = (weight_h, bias_h) if kind == "layer" else (weight_h,)
    kernels = WideNorms(CPU)
    ours, formula = FORMULAS[kind]
    output = ours(kernels, x, *parameters, 1e-5)
    wide = [t.detach().double().requires_grad_() for t in (x, *parameters)]
    expected = formula(*wide, 1e-5)
    grad = torch.randn(50, 48).to(dtype)
    got = torch.autograd.grad(output, (x, *parameters), grad)
    want = torch.autograd.grad(expected, wide, grad.double())
    half_unit = {torch.bfloat16: 2**-9, torch.float16: 2**-12}[dtype]
    assert output.dtype == dtype
    assert relative_error(output, expected) < half_unit
    assert [t.dtype for t in got] == [torch.float32, *(dtype for _ in parameters)]
    assert relative_error(got[0], want[0]) < 1e-4
    for own, exact in zip(got[1:], want[1:], strict=True):
        assert relative_error(own, exact) < 2 * half_unit
