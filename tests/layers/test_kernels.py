"""The fused C++ kernels against PyTorch's, and the fallback where nothing can be compiled."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.layers import kernels
from megatron.layers.kernels import Kernels, NativeKernels, TorchKernels, make_kernels

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def native() -> Kernels:
    kernels = make_kernels(CPU, torch.bfloat16)
    assert isinstance(kernels, NativeKernels), "the tests need a C++ compiler"
    return kernels


SHAPES = [(1, 1), (3, 5), (31, 64), (32, 64), (33, 65), (64, 130), (100, 513), (257, 1100)]


@pytest.mark.parametrize(("rows", "tokens"), SHAPES)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_exponentials_carry_maximum_and_sum_over_tiles(
    native: Kernels, rows: int, tokens: int, scale: float
) -> None:
    torch.manual_seed(rows)
    tiles = [(torch.randn(rows, tokens) * scale).bfloat16() for _ in range(3)]
    logits = torch.cat(tiles).double()
    max_n, sum_n = torch.full((tokens,), -torch.inf), torch.zeros(tokens)
    for tile_tn in tiles:
        exact, old_max_n = tile_tn.double(), max_n.clone()
        shrink_n = native.exp_tile(tile_tn, max_n, sum_n)
        torch.testing.assert_close(shrink_n, (old_max_n - max_n).exp(), rtol=1e-6, atol=1e-37)
        expected = (exact - max_n).exp()
        # Half a unit in the last of bf16's 8 digits; below 1e-37 the kernel does not vanish.
        torch.testing.assert_close(tile_tn.double(), expected, rtol=2**-8, atol=1e-37)
    assert torch.equal(max_n.double(), logits.amax(0))
    torch.testing.assert_close(
        sum_n.double(), (logits - logits.amax(0)).exp().sum(0), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(native: Kernels, value: float) -> None:
    logits_tn = torch.zeros(40, 70).bfloat16()
    logits_tn[7, 9] = value
    max_n, sum_n = torch.full((70,), -torch.inf), torch.zeros(70)
    native.exp_tile(logits_tn, max_n, sum_n)
    finite = sum_n.isfinite()
    assert not finite[9]
    assert finite.sum() == 69


@pytest.mark.parametrize(("rows", "tokens"), SHAPES)
def test_transposition(native: Kernels, rows: int, tokens: int) -> None:
    tile_tn = torch.randn(rows, tokens).bfloat16()
    assert torch.equal(native.transposed(tile_tn), tile_tn.T)


class LargestFp32(TorchDispatchMode):
    """Notes the most elements that the result of an operation has in fp32."""

    elements = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.elements = max(self.elements, result.numel())
        return result


def test_pytorch_needs_little_memory_for_exponentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile is as large as a GPU likes it; what of it is in fp32 at a time is not."""
    monkeypatch.setattr(kernels, "EXPONENTIALS_AT_ONCE", 200)
    torch.manual_seed(0)
    logits_tn = (10 * torch.randn(101, 64)).bfloat16()
    exact, max_n, sum_n = logits_tn.double(), torch.full((64,), -torch.inf), torch.zeros(64)
    with LargestFp32() as largest:
        TorchKernels().exp_tile(logits_tn, max_n, sum_n)
    assert 64 < largest.elements <= 200
    expected = (exact - exact.amax(0)).exp()
    torch.testing.assert_close(logits_tn.double(), expected, rtol=2**-8, atol=1e-37)
    torch.testing.assert_close(sum_n.double(), expected.sum(0), rtol=1e-5, atol=0)


def test_scaling_and_adding_round_as_pytorch_does(native: Kernels) -> None:
    plain = TorchKernels()
    torch.manual_seed(0)
    x_nh, factor_n = torch.randn(37, 65).bfloat16(), torch.randn(37)
    assert torch.equal(native.scaled(x_nh, factor_n), plain.scaled(x_nh, factor_n))
    total, expected = torch.randn(37, 65), torch.empty(37, 65)
    expected.copy_(total)
    native.add(total, x_nh)
    plain.add(expected, x_nh)
    assert torch.equal(total, expected)
    native.rescale_add(total, factor_n, x_nh)
    plain.rescale_add(expected, factor_n, x_nh)
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32), ("cpu", torch.float64), ("meta", torch.bfloat16)],
)
def test_everything_else_runs_in_pytorch(device: str, dtype: torch.dtype) -> None:
    assert isinstance(make_kernels(torch.device(device), dtype), TorchKernels)


@pytest.mark.parametrize("compiler", ["/nonexistent/c++", "false"])
def test_without_a_compiler_pytorch_serves_and_the_log_says_why(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.WARNING):
        assert isinstance(make_kernels(CPU, torch.bfloat16, cache=tmp_path), TorchKernels)
    assert "elementwise work runs in PyTorch" in caplog.text
    assert compiler in caplog.text
