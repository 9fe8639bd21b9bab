"""How a GPU adds products to sums, as far as it can be known without one."""

import sys
from types import SimpleNamespace

import pytest
import torch
from kernels.implementations import CPU, relative_error
from torch import Tensor

products = pytest.importorskip("megatron.kernels.cuda.products", exc_type=ImportError)

APEX = "fused_weight_gradient_mlp_cuda"


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    """A sum [5, 6], the gradient of 7 tokens' outputs, and their inputs."""
    generator = torch.Generator().manual_seed(0)
    total, grad_no, x_ni = (
        torch.randn(shape, generator=generator) for shape in ((5, 6), (7, 5), (7, 6))
    )
    return total, grad_no.bfloat16(), x_ni.bfloat16()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What apex's kernel is given; it has the signature by which Megatron-LM calls it."""
    given: list[Tensor] = []

    def wgrad_gemm_accum_fp32(x_ni: Tensor, grad_no: Tensor, main_grad_oi: Tensor) -> None:
        assert x_ni.is_contiguous()
        assert grad_no.is_contiguous()
        assert main_grad_oi.is_contiguous()
        main_grad_oi += grad_no.float().T @ x_ni.float()
        given.append(x_ni)

    module = SimpleNamespace(wgrad_gemm_accum_fp32=wgrad_gemm_accum_fp32)
    monkeypatch.setitem(sys.modules, APEX, module)
    return given


def test_apex_serves_where_pytorch_has_no_such_product(calls: list[Tensor]) -> None:
    total, grad_no, x_ni = drawn()
    expected = total.double() + grad_no.double().T @ x_ni.double()
    found = products.Products(CPU, torch.bfloat16)
    assert found.way == "by apex"
    assert found.accumulates
    found.accumulate_(total, grad_no.T, x_ni)
    assert len(calls) == 1
    assert relative_error(total, expected) < 1e-6


def test_apex_gets_no_factor_whose_tokens_are_not_rows(calls: list[Tensor]) -> None:
    """It goes by pointers, and would take the numbers in another order."""
    total, grad_no, x_ni = drawn()
    expected = total.double() + grad_no.double().T @ x_ni.double()
    products.Products(CPU, torch.bfloat16).accumulate_(total, grad_no.T.contiguous(), x_ni)
    assert calls == []
    assert relative_error(total, expected) < 1e-2


def test_without_either_the_addition_is_separate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, APEX, None)
    found = products.Products(CPU, torch.bfloat16)
    assert found.way == "separately"
    assert not found.accumulates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_of_the_factors_own_type_are_added_to_in_the_product(dtype: torch.dtype) -> None:
    total, grad_no, x_ni = (t.to(dtype) for t in drawn())
    expected = total.double() + grad_no.double().T @ x_ni.double()
    products.Products(CPU, dtype).accumulate_(total, grad_no.T, x_ni)
    assert relative_error(total, expected) < (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sum_may_begin_with_a_product(dtype: torch.dtype) -> None:
    total, grad_no, x_ni = drawn()
    grad_no, x_ni = grad_no.to(dtype), x_ni.to(dtype)
    expected = grad_no.double().T @ x_ni.double()
    total.fill_(torch.nan)
    products.Products(CPU, dtype).accumulate_(total, grad_no.T, x_ni, begins=True)
    assert relative_error(total, expected) < (1e-6 if dtype == torch.float32 else 4e-3)
    total.fill_(torch.nan)
    products.Products(CPU, dtype).accumulate_(total, grad_no[:0].T, x_ni[:0], begins=True)
    assert not total.any()


def test_no_tokens_add_nothing() -> None:
    total = drawn()[0]
    before = total.clone()
    empty = torch.empty(0, 5, dtype=torch.bfloat16), torch.empty(0, 6, dtype=torch.bfloat16)
    products.Products(CPU, torch.bfloat16).accumulate_(total, empty[0].T, empty[1])
    assert torch.equal(total, before)
