"""The MLP against its formula in float64."""

from collections.abc import Callable

import pytest
import torch
from kernels.formulas import (
    explicit_exact_gelu,
    explicit_geglu,
    explicit_gelu,
    explicit_relu,
    explicit_squared_relu,
    explicit_swiglu,
)
from torch import Tensor

from megatron.flags.tree import declared_in
from megatron.layers.main_grad import give_main_grad, main_grad_of
from megatron.layers.mlp import MLP, Activation
from megatron.layers.recompute import NO_RECOMPUTATION, Recomputation
from megatron.layers.settings import MLPSettings
from megatron.layers.site import Site
from megatron.layers.weight_gradients import defer_weight_gradients

CPU = torch.device("cpu")
FORMULAS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": explicit_gelu,
    "exact_gelu": explicit_exact_gelu,
    "relu": explicit_relu,
    "swiglu": explicit_swiglu,
    "geglu": explicit_geglu,
    "squared_relu": explicit_squared_relu,
}


def make_mlp(
    activation: Activation,
    dtype: torch.dtype,
    bias: bool = True,
    again: Recomputation = NO_RECOMPUTATION,
) -> MLP:
    site = Site(CPU, dtype, recomputation=again)
    mlp = MLP(6, 10, site, activation=activation, bias=bias)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    return mlp


def test_every_function_of_the_settings_is_compared_with_its_formula() -> None:
    spelled = (own.spelling for own in declared_in(MLPSettings)["activation"])
    names = {own.value for own in spelled if own is not None}
    assert FORMULAS.keys() == (names | {MLPSettings.activation}) - {"quick_geglu"}


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


def inputs_of_fc2(mlp: MLP, x: Tensor) -> tuple[int, list[Tensor]]:
    """Train once, in B and W; return the elements of [..., f] that were kept, and all gradients."""
    work: list[Callable[[], None]] = []
    for parameter in mlp.parameters():
        give_main_grad(parameter, torch.zeros_like(parameter))
    defer_weight_gradients(mlp, work.append)
    inner = mlp.linear_fc2.in_features
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.dim() == 3 and tensor.shape[-1] in (inner, 2 * inner):
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    x = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = mlp(x)
    y.square().sum().backward()
    for each in work:
        each()
    assert x.grad is not None
    biases = [p.grad for p in mlp.parameters() if p.grad is not None]
    return sum(kept.values()), [x.grad, *biases, *(main_grad_of(p) for p in mlp.parameters())]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", FORMULAS)
def test_an_activation_computed_again_gives_the_same_bits(
    activation: Activation, bias: bool
) -> None:
    """The last product keeps no input, but for the result that squared ReLU keeps anyway."""
    plain = make_mlp(activation, torch.float32, bias)
    again = make_mlp(activation, torch.float32, bias, Recomputation(frozenset({"mlp_act"})))
    again.load_state_dict(plain.state_dict())
    x = torch.randn(4, 5, 6)
    (whole, expected), (less, found) = inputs_of_fc2(plain, x), inputs_of_fc2(again, x)
    dropped = 0 if activation == "squared_relu" else 4 * 5 * 10
    assert whole - less == dropped
    assert len(found) == len(expected)
    for own, wanted in zip(found, expected, strict=True):
        assert torch.equal(own, wanted)
