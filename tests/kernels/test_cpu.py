"""What a CPU's kernels promise beyond the contract: exactness, layouts, what is not finite."""

import math

import pytest
import torch
from kernels.formulas import (
    explicit_attention,
    explicit_gelu,
    explicit_layer_norm,
    explicit_squared_relu,
)
from kernels.implementations import compiled, relative_error
from torch import Tensor

from megatron.kernels.cpu import compiled_attention
from megatron.kernels.cpu.kernels import CpuKernels
from megatron.kernels.face import Kernels
from megatron.kernels.heads import split_heads


def test_gelu_of_float64_is_its_formula_to_the_last_digits() -> None:
    # more elements than one tile, and not a multiple of it
    x = torch.linspace(-60, 60, 70_001, dtype=torch.float64, requires_grad=True)
    output, expected = CpuKernels().gelu(x), explicit_gelu(x)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-14)
    (got,), (want,) = (torch.autograd.grad(y.sum(), x) for y in (output, expected))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("make", [compiled, CpuKernels])
def test_gelu_of_bf16_is_rounded_once(make: type) -> None:
    x = torch.linspace(-60, 60, 30_001).bfloat16().requires_grad_()
    wide = x.detach().double().requires_grad_()
    output, expected = make().gelu(x), explicit_gelu(wide)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), expected, rtol=2**-8, atol=1e-6)
    (got,), (want,) = (torch.autograd.grad(y.sum(), i) for y, i in ((output, x), (expected, wide)))
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("make", [compiled, CpuKernels])
def test_squared_relu_of_bf16_is_rounded_once(make: type) -> None:
    """Its backward, too: no digit is lost by taking the root of the output."""
    x = torch.linspace(-60, 60, 30_001).bfloat16().requires_grad_()
    wide = x.detach().double().requires_grad_()
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(x.shape, generator=generator).bfloat16()
    output, expected = make().squared_relu(x), explicit_squared_relu(wide)
    torch.testing.assert_close(output, expected.bfloat16(), rtol=0, atol=0)
    (got,) = torch.autograd.grad(output, x, grad)
    (want,) = torch.autograd.grad(expected, wide, grad.double())
    torch.testing.assert_close(got, want.bfloat16(), rtol=0, atol=0)


def layer_norm_and_gradients(dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of input, weight and bias for the same fp32 numbers in any type."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(2, 2000, 16, generator=generator).to(dtype) for _ in range(2))
    weight, bias = torch.ones(16, dtype=dtype), torch.zeros(16, dtype=dtype)
    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    output = CpuKernels().layer_norm(x, weight, bias, 1e-5)
    return [output, *torch.autograd.grad(output, inputs, grad)]


def test_layer_norm_in_fp32_is_right_to_the_last_digit() -> None:
    narrow, wide = (layer_norm_and_gradients(t) for t in (torch.float32, torch.float64))
    for got, want in zip(narrow, wide, strict=True):
        assert got.dtype == torch.float32
        # half a unit in the last place: the result is rounded once, whatever was summed before
        torch.testing.assert_close(got.double(), want, rtol=6e-8, atol=1e-12)


def test_layer_norm_in_bf16_rounds_its_results_and_nothing_else() -> None:
    """Sums over 4000 rows, too: PyTorch's kernel is 5 % off in those of weight and bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 2000, 48), (48,), (48,), (2, 2000, 48))
    *inputs, grad = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    narrow = [t.requires_grad_() for t in inputs]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    (x, weight, bias), (x64, weight64, bias64) = narrow, wide
    output = compiled().layer_norm(x, weight, bias, 1e-5)
    expected = explicit_layer_norm(x64, weight64, bias64, 1e-5)
    got = [output, *torch.autograd.grad(output, narrow, grad)]
    want = [expected, *torch.autograd.grad(expected, wide, grad.double())]
    for own, exact in zip(got, want, strict=True):
        assert own.dtype == torch.bfloat16
        assert relative_error(own, exact) < 2**-8  # half a unit in the last of 8 digits: 2**-9


def test_layer_norm_in_bf16_does_not_hide_a_sum_that_overflows() -> None:
    x = torch.randn(2, 16).bfloat16()
    x[0] *= 1e30  # whose squares are too large for fp32
    finite = compiled().layer_norm(x, x[1], x[1], 1e-5).isfinite()
    assert not finite[0].any()
    assert finite[1].all()


def random_qkv(
    batch: int, heads: int, groups: int, seq: int, size: int, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """Transposed views, as the layer passes them."""
    generator = torch.Generator().manual_seed(seq)
    return [
        torch.randn(batch, seq, n, size, generator=generator, dtype=torch.float64)
        .to(dtype)
        .transpose(1, 2)
        .requires_grad_()
        for n in (heads, groups, groups)
    ]


@pytest.mark.parametrize(
    ("batch", "heads", "groups", "seq"),
    [
        pytest.param(2, 4, 4, 7, id="one block"),
        pytest.param(2, 6, 2, 7, id="grouped"),
        pytest.param(1, 2, 2, 512, id="two blocks"),
        pytest.param(2, 4, 1, 300, id="uneven blocks, grouped"),
        pytest.param(1, 4, 2, 520, id="kernel of PyTorch, grouped"),
    ],
)
def test_attention_in_float64_is_its_formula(batch: int, heads: int, groups: int, seq: int) -> None:
    qkv = random_qkv(batch, heads, groups, seq, 8, torch.float64)
    output = CpuKernels().causal_attention(*qkv)
    expected = explicit_attention(*qkv)
    grad = torch.randn(expected.shape, dtype=torch.float64)
    torch.testing.assert_close(output, expected)
    for got, want in zip(
        torch.autograd.grad(output, qkv, grad),
        torch.autograd.grad(expected, qkv, grad),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def test_gradcheck_of_attention_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_attention, "BLOCK", 2)
    qkv = random_qkv(1, 4, 2, 5, 2, torch.float64)
    kernels = CpuKernels()
    assert torch.autograd.gradcheck(lambda *t: kernels.causal_attention(*t), qkv)


def attention_in_bf16(
    kernels: Kernels, batch: int, heads: int, groups: int, seq: int, size: int, scale: float = 1.0
) -> list[tuple[Tensor, Tensor]]:
    """Output and gradients, each with what the formula gives in float64 for the same inputs."""
    narrow = [
        (t * scale).detach().requires_grad_() for t in random_qkv(batch, heads, groups, seq, size)
    ]
    wide = [t.detach().double().requires_grad_() for t in narrow]
    output = kernels.causal_attention(*narrow)
    expected = explicit_attention(*wide)
    grad = torch.randn(expected.shape).bfloat16()
    got = torch.autograd.grad(output, narrow, grad)
    want = torch.autograd.grad(expected, wide, grad.double())
    return [(output, expected), *zip(got, want, strict=True)]


@pytest.mark.parametrize(
    ("batch", "heads", "groups", "seq", "size"),
    [
        pytest.param(1, 4, 4, 1, 16, id="one position"),
        pytest.param(2, 4, 4, 33, 24, id="one block"),
        pytest.param(2, 6, 2, 33, 16, id="one block, grouped"),
        pytest.param(1, 6, 2, 129, 16, id="an odd row after whole vectors, grouped"),
        pytest.param(1, 2, 2, 512, 16, id="two blocks"),
        pytest.param(2, 4, 1, 700, 8, id="uneven blocks, grouped"),
        pytest.param(1, 4, 2, 1030, 8, id="kernel of PyTorch, grouped"),
    ],
)
def test_attention_in_bf16_stays_within_bf16_rounding(
    batch: int, heads: int, groups: int, seq: int, size: int
) -> None:
    (output, expected), *gradients = attention_in_bf16(compiled(), batch, heads, groups, seq, size)
    assert relative_error(output, expected) < 5e-3
    for got, want in gradients:
        assert (got.double() - want).norm() <= 1e-2 * want.norm() + 1e-12


def test_attention_without_a_compiler_stays_within_bf16_rounding() -> None:
    for got, want in attention_in_bf16(CpuKernels(), 2, 4, 2, 320, 16):
        assert relative_error(got, want) < 1e-2


@pytest.mark.parametrize(("batch", "heads", "groups", "seq"), [(1, 2, 2, 9), (2, 6, 2, 300)])
def test_of_a_fused_projection_attention_is_that_of_its_parts(
    batch: int, heads: int, groups: int, seq: int
) -> None:
    """To the bit: the same products of the same numbers, only gathered from elsewhere."""
    qkv = torch.randn(batch, seq, groups, heads // groups + 2, 16).bfloat16().requires_grad_()
    q, k, v = (t.transpose(1, 2) for t in split_heads(qkv))
    apart = compiled().causal_attention(q, k, v).transpose(1, 2).flatten(2)
    fused = compiled().causal_self_attention(qkv)
    assert torch.equal(fused, apart)
    grad = torch.randn(apart.shape).bfloat16()
    for got, want in zip(
        torch.autograd.grad(fused, qkv, grad), torch.autograd.grad(apart, qkv, grad), strict=True
    ):
        assert torch.equal(got, want)


def test_scores_of_any_size_and_blocks_of_few_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_attention, "BLOCK", 3)
    for got, want in attention_in_bf16(compiled(), 2, 6, 2, 17, 16, scale=4.0):
        assert relative_error(got, want) < 5e-2  # scores up to 50 have an error of 1/8
    assert len(compiled_attention.blocks(17)) == 6


def test_gradients_of_a_row_of_scores_sum_to_zero() -> None:
    """Rounded probabilities do not sum to one: felt where all values are far from zero."""
    q, k, v = (t.detach() for t in random_qkv(1, 2, 2, 300, 16))
    q.requires_grad_()
    output = compiled().causal_attention(q, torch.ones_like(k), v + 8)
    (grad,) = torch.autograd.grad(output, q, torch.randn(output.shape).bfloat16())
    assert grad.abs().max() < 0.01  # all keys are the same; 0.06 with a mean not over their sum


def test_backward_of_attention_can_be_run_twice() -> None:
    qkv = random_qkv(1, 2, 2, 300, 16)
    output = compiled().causal_attention(*qkv)
    grad = torch.randn(output.shape).bfloat16()
    first = torch.autograd.grad(output, qkv, grad, retain_graph=True)
    second = torch.autograd.grad(output, qkv, grad)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradient_that_is_not_finite_spares_the_keys_that_its_row_does_not_see() -> None:
    q, k, v = random_qkv(1, 2, 2, 150, 16)
    output = compiled().causal_attention(q, k, v)
    grad = torch.ones_like(output).index_fill(2, torch.tensor(70), math.nan)
    (k_grad,) = torch.autograd.grad(output, k, grad)
    assert k_grad[:, :, :71].isnan().all()
    assert k_grad[:, :, 71:].isfinite().all()


def test_what_is_not_finite_reaches_only_those_who_see_it() -> None:
    q, k, v = (t.detach() for t in random_qkv(1, 2, 2, 9, 16))
    q, k, v = (t.requires_grad_() for t in (q, k.index_fill(2, torch.tensor(5), math.nan), v))
    output = compiled().causal_attention(q, k, v)
    assert output[:, :, :5].isfinite().all()
    assert output[:, :, 5:].isnan().all()
    output.sum().backward()
    assert q.grad is not None
    assert q.grad[:, :, 5:].isnan().all()
