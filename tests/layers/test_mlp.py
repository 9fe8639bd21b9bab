"""GELU, SwiGLU and the MLP against their formulas in float64."""

import math

import pytest
import torch
from torch import Tensor

from megatron.layers import activation
from megatron.layers.activation import gelu, swiglu
from megatron.layers.mlp import MLP

CPU = torch.device("cpu")


def explicit_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def test_gelu_is_the_tanh_formula_at_every_magnitude() -> None:
    # more elements than one tile, and not a multiple of it
    x = torch.linspace(-60, 60, 70_001, dtype=torch.float64, requires_grad=True)
    output, expected = gelu(x), explicit_gelu(x)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-14)
    (got,), (want,) = (torch.autograd.grad(y.sum(), x) for y in (output, expected))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("compiled", [True, False])
def test_gelu_of_bf16_is_rounded_once(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiled:
        assert activation.library_for(torch.ones(1).bfloat16()), "the tests need a C++ compiler"
    else:
        monkeypatch.setattr(activation, "library_for", lambda _: None)
    x = torch.linspace(-60, 60, 30_001).bfloat16().requires_grad_()
    wide = x.detach().double().requires_grad_()
    output, expected = gelu(x), explicit_gelu(wide)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), expected, rtol=2**-8, atol=1e-6)
    (got,), (want,) = (torch.autograd.grad(y.sum(), i) for y, i in ((output, x), (expected, wide)))
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-5)


def test_gelu_of_what_is_not_finite_is_not_hidden() -> None:
    x = torch.tensor([math.nan, math.inf] * 20).bfloat16()
    assert not gelu(x).isfinite().any()


def test_gelu_takes_strided_input() -> None:
    x = torch.randn(6, 4, dtype=torch.float64).T.requires_grad_()
    assert torch.autograd.gradcheck(gelu, (x,))


def test_swiglu_gates_with_the_first_half() -> None:
    gate_up = torch.tensor([[1.0, -2.0, 3.0, 5.0]], dtype=torch.float64)
    expected = [3 / (1 + math.exp(-1)), 5 * -2 / (1 + math.exp(2))]
    torch.testing.assert_close(swiglu(gate_up)[0].tolist(), expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_mlp_is_its_formula(gated: bool, bias: bool) -> None:
    mlp = MLP(6, 10, gated=gated, bias=bias, device=CPU, dtype=torch.float64)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    assert len(list(mlp.parameters())) == (4 if bias else 2)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    inner = x @ mlp.linear_fc1.weight.T + (mlp.linear_fc1.bias if bias else 0)
    if gated:
        gate, up = inner[..., :10], inner[..., 10:]
        inner = gate / (1 + torch.exp(-gate)) * up
    else:
        inner = explicit_gelu(inner)
    expected = inner @ mlp.linear_fc2.weight.T + (mlp.linear_fc2.bias if bias else 0)
    torch.testing.assert_close(mlp(x), expected)
