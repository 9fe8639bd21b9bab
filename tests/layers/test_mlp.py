"""The MLP against its formula in float64."""

import pytest
import torch
from kernels.formulas import explicit_gelu, explicit_swiglu

from megatron.kernels.choose import kernels_for
from megatron.layers.mlp import MLP

CPU = torch.device("cpu")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_mlp_is_its_formula(gated: bool, bias: bool) -> None:
    kernels = kernels_for(CPU, torch.float64)
    mlp = MLP(6, 10, gated=gated, bias=bias, device=CPU, dtype=torch.float64, kernels=kernels)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    assert len(list(mlp.parameters())) == (4 if bias else 2)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    inner = x @ mlp.linear_fc1.weight.T + (mlp.linear_fc1.bias if bias else 0)
    inner = explicit_swiglu(inner) if gated else explicit_gelu(inner)
    expected = inner @ mlp.linear_fc2.weight.T + (mlp.linear_fc2.bias if bias else 0)
    torch.testing.assert_close(mlp(x), expected)
