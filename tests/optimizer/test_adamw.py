"""AdamW steps against the formulas of the paper (arXiv 1711.05101) written out in float64."""

import dataclasses

import pytest
import torch
from optimizer.entries import entries, optimizer_of, rates_of
from torch import nn

from megatron.kernels.choose import kernels_for
from megatron.layers.main_grad import main_grad_of
from megatron.model.ownership import OwnedParameter
from megatron.optimizer.bucket import Bucket
from megatron.optimizer.optimizer import Optimizer
from megatron.optimizer.settings import OptimizerSettings

CPU = torch.device("cpu")
CONFIG = OptimizerSettings(lr=0.1, weight_decay=0.3, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-6)
RATES = [0.1, 0.05, 0.2]
SHAPES = {"fc.weight": (6, 4), "fc.bias": (6,), "norm.weight": (4,), "table.weight": (9, 4)}


def alone(parameter: nn.Parameter, *, weight_decay: bool) -> Optimizer:
    owned = OwnedParameter.whole("w" if weight_decay else "w.bias", parameter)
    Bucket([owned], kernels_for(CPU, parameter.dtype))
    return optimizer_of(CONFIG, [owned])


def start(name: str) -> torch.Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(len(name)))


def gradients() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [{n: torch.randn(s, generator=generator) for n, s in SHAPES.items()} for _ in RATES]


def train(dtype: torch.dtype) -> tuple[dict[str, nn.Parameter], list[float]]:
    """Three steps of the class under test; returns the parameters and the norms it was given."""
    parameters = {name: nn.Parameter(start(name).to(dtype)) for name in SHAPES}
    owned = entries(parameters.items())
    bucket = Bucket(owned, kernels_for(CPU, dtype))
    optimizer = optimizer_of(CONFIG, owned)
    norms = []
    for lr, grads in zip(RATES, gradients(), strict=True):
        for name, parameter in parameters.items():
            main_grad_of(parameter).copy_(grads[name])
        norms.append(float(torch.cat([g.flatten() for g in grads.values()]).norm()))
        optimizer.step(rates_of(CONFIG, lr), norms[-1])
        bucket.gradients.zero_()
    return parameters, norms


def by_hand(name: str, dtype: torch.dtype, norms: list[float]) -> torch.Tensor:
    """The same three steps in float64; decay on the two matrices only."""
    w = start(name).to(dtype).double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    decay = CONFIG.weight_decay if name in ("fc.weight", "table.weight") else 0.0
    for step, (lr, grads) in enumerate(zip(RATES, gradients(), strict=True), start=1):
        g = grads[name].double() * min(1.0, 1.0 / (norms[step - 1] + 1e-6))
        m = CONFIG.adam_beta1 * m + (1 - CONFIG.adam_beta1) * g
        v = CONFIG.adam_beta2 * v + (1 - CONFIG.adam_beta2) * g * g
        m_hat = m / (1 - CONFIG.adam_beta1**step)
        v_hat = v / (1 - CONFIG.adam_beta2**step)
        w = w - lr * decay * w - lr * m_hat / (v_hat.sqrt() + CONFIG.adam_eps)
    return w


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-6)])
def test_full_precision_follows_the_formulas(dtype: torch.dtype, rtol: float) -> None:
    parameters, norms = train(dtype)
    for name, parameter in parameters.items():
        expected = by_hand(name, dtype, norms).to(dtype)
        torch.testing.assert_close(parameter.detach(), expected, rtol=rtol, atol=rtol)


def test_bf16_parameters_are_the_rounded_fp32_masters() -> None:
    parameters, norms = train(torch.bfloat16)
    for name, parameter in parameters.items():
        expected = by_hand(name, torch.bfloat16, norms)
        assert parameter.dtype == torch.bfloat16
        # Half a unit in the last place of bf16: any rounding between the steps would exceed it.
        error = (parameter.detach().double() - expected).abs()
        assert torch.all(error <= expected.abs() * 2.0**-8 + 1e-6), name


def test_bf16_keeps_steps_too_small_for_bf16() -> None:
    parameter = nn.Parameter(torch.ones(16, 16, dtype=torch.bfloat16))
    optimizer = alone(parameter, weight_decay=False)
    for _ in range(64):  # 64 steps of 2**-12 are 2**-6; one alone is lost in bf16 (2**-9)
        main_grad_of(parameter).fill_(1.0)
        optimizer.step(rates_of(CONFIG, 2.0**-12), grad_norm=0.5)
    torch.testing.assert_close(parameter.detach().float(), torch.full((16, 16), 1 - 2.0**-6))


@pytest.mark.parametrize("asked", [False, True])
def test_norms_of_queries_and_keys_decay_if_a_flag_says_so(asked: bool) -> None:
    """Without a gradient, a step of AdamW changes a weight by its decay alone."""
    attention = "decoder.layers.0.self_attention"
    decay = {
        f"{attention}.q_layernorm.weight": asked,
        f"{attention}.q_layernorm.bias": asked,
        f"{attention}.k_layernorm.weight": asked,
        f"{attention}.linear_qkv.bias": False,
        f"{attention}.kv_layernorm.weight": False,
        "decoder.layers.0.input_layernorm.weight": False,
        "decoder.final_layernorm.bias": False,
    }
    parameters = {name: nn.Parameter(torch.ones(4)) for name in decay}
    config = dataclasses.replace(CONFIG, apply_wd_to_qk_layernorm=asked)
    owned = entries(parameters.items())
    Bucket(owned, kernels_for(CPU, torch.float32))
    optimizer_of(config, owned).step(rates_of(config, 0.1), grad_norm=0.0)
    for name, decays in decay.items():
        wanted = torch.full((4,), 1 - 0.1 * 0.3 if decays else 1.0)
        torch.testing.assert_close(parameters[name].detach(), wanted)


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_that_is_no_number_changes_nothing(dtype: torch.dtype, norm: float) -> None:
    parameter = nn.Parameter(torch.ones(4, 4, dtype=dtype))
    optimizer = alone(parameter, weight_decay=True)
    with pytest.raises(FloatingPointError, match=str(norm)):
        optimizer.step(rates_of(CONFIG, 0.1), norm)
    assert torch.all(parameter == 1)


def test_full_precision_holds_no_second_copy() -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    address = parameter.data_ptr()
    optimizer = alone(parameter, weight_decay=True)
    main_grad_of(parameter).fill_(1.0)
    optimizer.step(rates_of(CONFIG, 0.1), 4.0)
    assert parameter.data_ptr() == address
    assert torch.all(parameter < 1)
