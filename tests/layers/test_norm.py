"""Norms against their formulas, and their starting values."""

import pytest
import torch

from megatron.layers import norm as norm_module
from megatron.layers.norm import build_norm

CPU = torch.device("cpu")


def test_layer_norm_is_its_formula() -> None:
    norm = build_norm("LayerNorm", 8, 0.1, torch.float64, CPU)
    x = torch.randn(3, 8, dtype=torch.float64)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(norm(x), expected)


def test_rms_norm_is_its_formula_and_has_no_bias() -> None:
    norm = build_norm("RMSNorm", 8, 0.1, torch.float64, CPU)
    x = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(norm(x), x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt())
    assert [name for name, _ in norm.named_parameters()] == ["weight"]


def layer_norm_and_gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients of input, weight and bias for the same fp32 numbers in any type."""
    generator = torch.Generator().manual_seed(0)
    norm = build_norm("LayerNorm", 16, 1e-5, dtype, CPU)
    x, grad = (torch.randn(2, 2000, 16, generator=generator).to(dtype) for _ in range(2))
    output = norm(x.requires_grad_())
    return [output, *torch.autograd.grad(output, [x, *norm.parameters()], grad)]


def test_layer_norm_in_fp32_is_right_to_the_last_digit() -> None:
    narrow, wide = (layer_norm_and_gradients(t) for t in (torch.float32, torch.float64))
    for got, want in zip(narrow, wide, strict=True):
        assert got.dtype == torch.float32
        # half a unit in the last place: the result is rounded once, whatever was summed before
        torch.testing.assert_close(got.double(), want, rtol=6e-8, atol=1e-12)


@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_layer_norm_in_fp32_forms_only_the_gradients_asked_for(trained: str) -> None:
    norm = build_norm("LayerNorm", 8, 1e-5, torch.float32, CPU)
    for name, parameter in norm.named_parameters():
        parameter.requires_grad_(name == trained)
    norm(torch.randn(3, 8)).sum().backward()
    assert [name for name, own in norm.named_parameters() if own.grad is not None] == [trained]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.detach().double() - want.detach()).norm() / want.detach().norm())


def test_layer_norm_in_bf16_rounds_its_results_and_nothing_else() -> None:
    """Sums over 4000 rows, too: PyTorch's kernel is 5 % off in those of weight and bias."""
    assert norm_module.library_for(torch.ones(1).bfloat16()), "the tests need a C++ compiler"
    generator = torch.Generator().manual_seed(0)
    norm = build_norm("LayerNorm", 48, 1e-5, torch.bfloat16, CPU)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(48, generator=generator))
    x, grad = (torch.randn(2, 2000, 48, generator=generator).bfloat16() for _ in range(2))
    inputs = [x.requires_grad_(), *norm.parameters()]
    output = norm(x)
    got = [output, *torch.autograd.grad(output, inputs, grad)]

    wide = [t.detach().double().requires_grad_() for t in inputs]
    expected = torch.nn.functional.layer_norm(wide[0], (48,), wide[1], wide[2], 1e-5)
    want = [expected, *torch.autograd.grad(expected, wide, grad.double())]
    for narrow, exact in zip(got, want, strict=True):
        assert narrow.dtype == torch.bfloat16
        assert relative_error(narrow, exact) < 2**-8  # half a unit in the last of 8 digits: 2**-9


def test_layer_norm_in_bf16_takes_any_layout() -> None:
    norm = build_norm("LayerNorm", 16, 1e-5, torch.bfloat16, CPU)
    x = torch.randn(16, 6, 2).bfloat16().permute(2, 1, 0).requires_grad_()
    expected = torch.nn.functional.layer_norm(x.detach().double(), (16,))
    output = norm(x)
    assert relative_error(output, expected) < 2**-8
    grad = torch.randn(6, 16).bfloat16().expand(2, 6, 16)
    wide = x.detach().double().requires_grad_()
    for got, want in zip(
        torch.autograd.grad(output, x, grad),
        torch.autograd.grad(torch.nn.functional.layer_norm(wide, (16,)), wide, grad.double()),
        strict=True,
    ):
        assert relative_error(got, want) < 2**-7


def test_layer_norm_in_bf16_does_not_hide_what_is_not_finite() -> None:
    norm = build_norm("LayerNorm", 16, 1e-5, torch.bfloat16, CPU)
    x = torch.randn(4, 16).bfloat16()
    x[0, 3], x[1, 4] = torch.nan, torch.inf
    x[2] *= 1e30  # whose squares are too large for fp32
    finite = norm(x).isfinite()
    assert not finite[:3].any()
    assert finite[3].all()


def test_layer_norm_in_bf16_without_a_compiler_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_module, "library_for", lambda _: None)
    monkeypatch.delattr(norm_module, "_CompiledLayerNorm")
    norm = build_norm("LayerNorm", 16, 1e-5, torch.bfloat16, CPU)
    x = torch.randn(3, 16).bfloat16()
    assert torch.equal(norm(x), torch.nn.functional.layer_norm(x, (16,), norm.weight, norm.bias))


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'BatchNorm': choose LayerNorm or RMSNorm"):
        build_norm("BatchNorm", 8, 1e-5, torch.float32, CPU)  # type: ignore[arg-type] # the point
