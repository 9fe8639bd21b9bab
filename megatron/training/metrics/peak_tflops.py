"""The peak speed of one rank; the model FLOPs utilisation (MFU) is a share of it.

The peak is the value of ``--peak-tflops`` if given. Otherwise it comes from a table of GPUs by name
(dense, no sparsity), or from a matrix product that is measured at the start. On a CPU such a
product is the best that can be reached in practice.

A CPU is shared: with other ranks that start at the same time, and with whatever else runs. The
clock on the wall would count the time in which others have the core, which on a busy machine is
most of it. So products on a CPU are timed in CPU time, which stands still meanwhile. What the MFU
then loses on a busy machine is a fact about the run, not about the measurement.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from megatron.schedules.counted import counted
from megatron.simulator.costs.gpus import tabulated_peak

MEASURE_SECONDS: Final = 0.3

CPU_PRODUCT: Final = 512
"""Rows and columns of the factors on a CPU: they stay in its cache, where a product reaches its
full speed, and a product takes a few milliseconds at most. Caches are cold after another process
has had the core, so many short products are measured, of which some are not disturbed."""

GPU_PRODUCT: Final = 8192
"""Rows and columns of the factors on a GPU, which needs large ones to reach its full speed."""


@dataclass(frozen=True)
class Peak:
    """Peak speed of one rank."""

    tflops: float
    source: str


def peak_of_rank(device: torch.device, dtype: torch.dtype, peak_tflops: float | None) -> Peak:
    """Find the peak of this rank.

    Returns:
        The peak and its source. A measurement takes a few hundred milliseconds. Let all ranks
        measure at the same time: a core is slower while its neighbours work, as they do later.
    """
    if peak_tflops is not None:
        return Peak(peak_tflops, "--peak-tflops")
    precision = str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = tabulated_tflops(name, dtype)
        if known is not None:
            return Peak(known, f"table: {name}, dense {precision}")
        return Peak(measure_tflops(device, dtype), f"measured: {precision} product on {name}")
    threads = torch.get_num_threads()
    return Peak(
        measure_tflops(device, dtype),
        f"measured in CPU time: {precision} product on {counted(threads, 'thread')} of a CPU",
    )


def tabulated_tflops(gpu_name: str, dtype: torch.dtype) -> float | None:
    """Return the dense peak of a GPU in TFLOP/s by its driver's name; ``None`` when unknown."""
    known = tabulated_peak(gpu_name)
    if known is None:
        return None
    narrow = dict.fromkeys((torch.bfloat16, torch.float16), known.bf16)  # with the same units
    return {**narrow, torch.float32: known.fp32}.get(dtype)


def measure_tflops(
    device: torch.device, dtype: torch.dtype, seconds: float = MEASURE_SECONDS
) -> float:
    """Return the speed of a square matrix product, the best of the runs within ``seconds``.

    Args:
        device: where to multiply.
        dtype: of both factors and of the product.
        seconds: time to spend, after one run to warm up; at least one run is measured. On a CPU it
            is CPU time of the calling thread.

    Returns:
        TFLOP/s.
    """
    size = GPU_PRODUCT if device.type == "cuda" else CPU_PRODUCT
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    times: list[float] = []
    _timed_product(a, b, product, clock)
    while sum(times) < seconds:
        times.append(_timed_product(a, b, product, clock))
    return 2 * size**3 / min(times) / 1e12


def _timed_product(
    a: torch.Tensor, b: torch.Tensor, product: torch.Tensor, clock: Callable[[], float]
) -> float:
    """Return the seconds of one product; the device's queue is drained before and after it."""
    _drain(a.device)
    begin = clock()
    torch.matmul(a, b, out=product)
    _drain(a.device)
    return clock() - begin


def _drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
