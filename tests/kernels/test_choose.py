"""Which kernels a device and a type get, and what the log says of them."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.kernels import choose
from megatron.kernels.choose import kernels_for
from megatron.kernels.cpu import library
from megatron.kernels.cpu.kernels import CompiledKernels, CpuKernels
from megatron.kernels.cuda.kernels import CudaKernels
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.native.extensions import CPU_KERNELS

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cpu", torch.float32, CpuKernels),
        ("cpu", torch.float64, CpuKernels),
        ("cpu", torch.bfloat16, CompiledKernels),
        ("meta", torch.bfloat16, ReferenceKernels),
        ("cuda:0", torch.float64, ReferenceKernels),
    ],
)
def test_the_fastest_are_chosen(device: str, dtype: torch.dtype, expected: type) -> None:
    assert type(kernels_for(torch.device(device), dtype)) is expected


def test_they_are_made_once_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    device = torch.device("xpu", 1)
    with caplog.at_level(logging.INFO):
        first, second = (kernels_for(device, torch.bfloat16) for _ in range(2))
    assert first is second
    assert caplog.messages == ["kernels: PyTorch's own on xpu"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_gpu_gets_triton(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert type(kernels_for(torch.device("cuda", 0), dtype)) is CudaKernels


def test_without_triton_a_gpu_gets_pytorch_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choose, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        kernels = kernels_for(torch.device("cuda", 7), torch.bfloat16)
    assert type(kernels) is ReferenceKernels
    assert "Triton is not installed" in caplog.text


@pytest.mark.parametrize("compiler", ["/nonexistent/c++", "false"])
def test_without_a_compiler_pytorch_serves_and_the_log_says_why(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copied = Path(shutil.copy(CPU_KERNELS.source, tmp_path))  # without its module
    monkeypatch.setattr(library, "CPU_KERNELS", replace(CPU_KERNELS, source=copied))
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.WARNING):
        assert type(kernels_for(CPU, torch.bfloat16, folder=tmp_path)) is CpuKernels
    assert "elementwise work runs in PyTorch" in caplog.text
    assert compiler in caplog.text
