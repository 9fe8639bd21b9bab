"""The MLP against its formula in float64."""

from collections.abc import Callable

import pytest
import torch
from kernels.formulas import explicit_geglu, explicit_gelu, explicit_squared_relu, explicit_swiglu
from torch import Tensor

from megatron.layers.mlp import MLP, Activation
from megatron.layers.site import Site
from megatron.layers.weight_gradients import defer_weight_gradients

CPU = torch.device("cpu")
FORMULAS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": explicit_gelu,
    "swiglu": explicit_swiglu,
    "geglu": explicit_geglu,
    "squared_relu": explicit_squared_relu,
}


def make_mlp(activation: Activation, dtype: torch.dtype, bias: bool = True) -> MLP:
    mlp = MLP(6, 10, Site(CPU, dtype), activation=activation, bias=bias)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    return mlp


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", FORMULAS)
def test_mlp_is_its_formula(activation: Activation, bias: bool) -> None:
    mlp = make_mlp(activation, torch.float64, bias)
    assert len(list(mlp.parameters())) == (4 if bias else 2)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    inner = x @ mlp.linear_fc1.weight.T + (mlp.linear_fc1.bias if bias else 0)
    inner = FORMULAS[activation](inner)
    expected = inner @ mlp.linear_fc2.weight.T + (mlp.linear_fc2.bias if bias else 0)
    torch.testing.assert_close(mlp(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squared_relu_keeps_one_inner_activation(dtype: torch.dtype) -> None:
    """What W of the second layer multiplies is what B of the activation needs, not a copy."""
    mlp = make_mlp("squared_relu", dtype)
    defer_weight_gradients(mlp, lambda work: None)
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.shape[-1] == 10 and not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        mlp(torch.randn(4, 5, 6, dtype=dtype))
    assert sum(kept.values()) == 4 * 5 * 10
