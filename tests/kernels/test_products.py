"""How a GPU adds products to sums, as far as it can be known without one."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernels.implementations import CPU, relative_error
from torch import Tensor

from megatron.kernels.cuda import products

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


class PyTorch:
    """The two functions of a release of PyTorch for CUDA that can add to fp32, by its source.

    Args:
        widens: both take a wider sum, as from 2.10 on; before, the one for matrices refuses it, and
            the one for batches does not look at it.
    """

    def __init__(self, widens: bool) -> None:
        self.widens = widens
        self.called: list[str] = []

    def addmm(self, own: Tensor, left: Tensor, right: Tensor, **named: Any) -> Tensor:
        self.called.append("addmm")
        if own.dtype != left.dtype and not self.widens:
            raise RuntimeError("self and mat2 must have the same dtype, but got Float and BFloat16")
        return self._add(own, left.float() @ right.float(), named)

    def baddbmm(self, own: Tensor, left: Tensor, right: Tensor, **named: Any) -> Tensor:
        self.called.append("baddbmm")
        return self._add(own, left.float() @ right.float(), named)

    def _add(self, own: Tensor, product: Tensor, named: Any) -> Tensor:
        out: Tensor = named["out"]
        assert named.get("out_dtype", out.dtype) == out.dtype == product.dtype
        assert out.shape == product.shape
        if self.widens:
            out.copy_(own)
        return out.add_(product)

    def mm(self, left: Tensor, right: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        return out.copy_(left.to(out_dtype) @ right.to(out_dtype))


@pytest.mark.parametrize(("widens", "by"), [(False, "baddbmm"), (True, "addmm")])
def test_every_pytorch_since_2_8_adds_to_fp32_in_the_product(
    widens: bool, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = PyTorch(widens)
    for name in ("addmm", "baddbmm", "mm"):
        monkeypatch.setattr(torch, name, getattr(release, name))
    total, grad_no, x_ni = drawn()
    product = grad_no.double().T @ x_ni.double()
    expected = total.double() + product
    found = products.Products(CPU, torch.bfloat16)
    assert found.way == "in the product"
    release.called.clear()
    found.accumulate_(total, grad_no.T, x_ni)
    assert release.called == [by]
    assert relative_error(total, expected) < 1e-6
    found.form(total, grad_no.T, x_ni)
    assert relative_error(total, product) < 1e-6


def test_a_function_that_loses_the_sum_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def overwriting(own: Tensor, left: Tensor, right: Tensor, **named: Any) -> Tensor:
        out: Tensor = named["out"]
        return out.copy_(left.float() @ right.float())

    monkeypatch.setattr(torch, "addmm", overwriting)
    monkeypatch.setattr(torch, "baddbmm", overwriting)
    monkeypatch.setitem(sys.modules, APEX, None)
    assert products.Products(CPU, torch.bfloat16).way == "separately"
