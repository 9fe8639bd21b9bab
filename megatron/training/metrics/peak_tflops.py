"""The peak speed of one rank; the model FLOPs utilisation (MFU) is a share of it.

The peak is the value of ``--peak-tflops`` if given. Otherwise it comes from a table of GPUs by name
(dense, no sparsity), or from a matrix product that is measured at the start. On a CPU such a
product is the best that can be reached in practice.

A CPU is shared with other ranks that start at the same time, and with other programs. Wall-clock
time would include the time in which they have the core; on a busy machine that is most of the time.
So products on a CPU are timed in CPU time, which leaves this time out. If the MFU is then low on a
busy machine, the run is slow, and the measurement of the peak is still right.
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
"""Rows and columns of the factors on a CPU. Factors of this size stay in the cache, where a product
reaches its full speed, and a product takes a few milliseconds at most. After another process has
had the core, the cache is cold. So many short products are measured, and some are not disturbed."""

GPU_PRODUCT: Final = 8192
"""Rows and columns of the factors on a GPU, which needs large factors to reach its full speed."""


@dataclass(frozen=True)
class Peak:
    """Peak speed of one rank."""

    tflops: float
    source: str


def peak_of_rank(device: torch.device, dtype: torch.dtype, peak_tflops: float | None) -> Peak:
    """Find the peak of this rank.

    Returns:
        The peak and its source. A measurement takes a few hundred milliseconds. Let all ranks
        measure at the same time: a core is slower while its neighbours work, as in training.
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
        dtype: type of both factors and of the product.
        seconds: time to spend, after one run to warm up; at least one run is measured. On a CPU the
            time is CPU time of the calling thread.

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
