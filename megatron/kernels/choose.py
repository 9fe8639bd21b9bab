"""Chooses the kernels of a process: the one place that asks what the device is."""

import logging
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from megatron.kernels.cpu.kernels import TILE_ROWS, CompiledKernels, CpuKernels
from megatron.kernels.cpu.library import cpu_library
from megatron.kernels.face import Kernels
from megatron.kernels.reference.kernels import ReferenceKernels

_LOG = logging.getLogger(__name__)


def kernels_for(device: torch.device, dtype: torch.dtype, folder: Path | None = None) -> Kernels:
    """Return the fastest kernels for activations of ``dtype`` on ``device``.

    Kernels are made once per process; the log then names them and the reason for the choice.

    Args:
        device: where parameters and activations live.
        dtype: type of activations.
        folder: folder of compiled libraries, by default the project's.
    """
    return _make(device, dtype, folder)


def _of_a_gpu(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Return the Triton kernels if Triton is here and has the type, else PyTorch's operations."""
    if find_spec("triton") is None:
        _LOG.warning("kernels: PyTorch's own on cuda, slower; Triton is not installed")
        return ReferenceKernels()
    from megatron.kernels.cuda.kernels import TYPES, CudaKernels  # no CPU needs Triton

    if dtype not in TYPES:
        _LOG.info("kernels: PyTorch's own on cuda; those of Triton know no %s", dtype)
        return ReferenceKernels()
    _LOG.info("kernels: cuBLAS and Triton on cuda")
    return CudaKernels(device, dtype)


@cache
def _make(device: torch.device, dtype: torch.dtype, folder: Path | None) -> Kernels:
    kind = device.type
    if kind == "meta":
        return ReferenceKernels()  # there is nothing to compute, so nothing to say
    if kind == "cuda":
        return _of_a_gpu(device, dtype)
    if kind != "cpu":
        _LOG.info("kernels: PyTorch's own on %s", kind)
        return ReferenceKernels()
    if dtype == torch.float16:
        _LOG.info("kernels: PyTorch's own; those for CPUs know fp32 and bf16 only")
        return ReferenceKernels(TILE_ROWS)
    if dtype != torch.bfloat16:
        _LOG.info("kernels: PyTorch arranged for a CPU; the compiled ones know bf16 only")
        return CpuKernels()
    library = cpu_library(folder)
    if library is None:
        return CpuKernels()  # the library has said why
    _LOG.info("kernels: compiled C++ for bf16 on a CPU")
    return CompiledKernels(library)
