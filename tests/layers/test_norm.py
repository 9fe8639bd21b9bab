"""Norms against their formulas, their starting values, and what of them is trained."""

from typing import Literal

import pytest
import torch
from kernels.formulas import explicit_layer_norm, explicit_rms_norm

from megatron.kernels.choose import kernels_for
from megatron.layers.norm import build_norm

CPU = torch.device("cpu")
FLOAT64, FLOAT32 = ((t, CPU, kernels_for(CPU, t)) for t in (torch.float64, torch.float32))


def test_layer_norm_is_its_formula() -> None:
    norm = build_norm("LayerNorm", 8, 0.1, *FLOAT64)
    x = torch.randn(3, 8, dtype=torch.float64)
    expected = explicit_layer_norm(x, torch.ones(8), torch.zeros(8), 0.1)
    torch.testing.assert_close(norm(x), expected)


def test_rms_norm_is_its_formula_and_has_no_bias() -> None:
    norm = build_norm("RMSNorm", 8, 0.1, *FLOAT64)
    x = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(norm(x), explicit_rms_norm(x, torch.ones(8), 0.1))
    assert [name for name, _ in norm.named_parameters()] == ["weight"]


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_zero_centred_weight_is_the_distance_from_one(
    kind: Literal["LayerNorm", "RMSNorm"],
) -> None:
    plain, centred = (build_norm(kind, 8, 0.1, *FLOAT64, zero_centred=z) for z in (False, True))
    x = torch.randn(3, 8, dtype=torch.float64)
    assert not centred.weight.any()
    torch.testing.assert_close(centred(x), plain(x))
    torch.nn.init.normal_(centred.weight)
    plain.load_state_dict({**centred.state_dict(), "weight": centred.weight.detach() + 1})
    torch.testing.assert_close(centred(x), plain(x))


@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_layer_norm_in_fp32_forms_only_the_gradients_asked_for(trained: str) -> None:
    norm = build_norm("LayerNorm", 8, 1e-5, *FLOAT32)
    for name, parameter in norm.named_parameters():
        parameter.requires_grad_(name == trained)
    norm(torch.randn(3, 8)).sum().backward()
    assert [name for name, own in norm.named_parameters() if own.grad is not None] == [trained]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_layer_norm_without_a_bias_adds_none(dtype: torch.dtype) -> None:
    norm = build_norm("LayerNorm", 8, 0.1, dtype, CPU, kernels_for(CPU, dtype), bias=False)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    assert [name for name, _ in norm.named_buffers()] == []
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 8, dtype=dtype).requires_grad_()
    scale, plain = norm.weight.detach().double().requires_grad_(), x.detach().double()
    plain.requires_grad_()
    expected = explicit_layer_norm(plain, scale, torch.zeros(8), 0.1)
    close = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(norm(x).double(), expected, rtol=close, atol=close)
    torch.testing.assert_close(
        norm.add(x, x)[1].double(),
        explicit_layer_norm(2 * plain, scale, torch.zeros(8), 0.1),
        rtol=close,
        atol=close,
    )
    norm(x).sum().backward()
    expected.sum().backward()
    assert norm.weight.grad is not None
    assert x.grad is not None
    torch.testing.assert_close(norm.weight.grad.double(), scale.grad, rtol=close, atol=close)
    torch.testing.assert_close(x.grad.double(), plain.grad, rtol=close, atol=close)


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'BatchNorm': choose LayerNorm or RMSNorm"):
        build_norm("BatchNorm", 8, 1e-5, *FLOAT32)  # type: ignore[arg-type] # the point
