"""The peak speed of one rank; the model FLOPs utilisation (MFU) is a share of it.

The peak is the value of ``--peak-tflops`` if given. Otherwise it comes from a table of GPUs by name
(dense, no sparsity), or from a matrix product that is measured at the start. On a CPU such a
product is the best that can be reached in practice.
"""

import time
from dataclasses import dataclass

import torch

from megatron.simulator.costs.gpus import tabulated_peak

MEASURE_SECONDS = 0.3


@dataclass(frozen=True)
class Peak:
    """Peak speed of one rank.

    Attributes:
        tflops: the peak in TFLOP/s.
        source: where the figure comes from, for the log.
    """

    tflops: float
    source: str


def peak_of_rank(device: torch.device, dtype: torch.dtype, peak_tflops: float | None) -> Peak:
    """Find the peak of this rank.

    Args:
        device: device that the rank computes on.
        dtype: ``torch.bfloat16`` or ``torch.float32``, of the matrix products.
        peak_tflops: the value of ``--peak-tflops``, which goes before every other source.

    Returns:
        The peak and its source. A measurement takes a few hundred milliseconds and depends on
        the load of the machine at that moment: let all ranks measure at the same time.
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
        f"measured: {precision} product on {threads} CPU thread{'s' if threads > 1 else ''}",
    )


def tabulated_tflops(gpu_name: str, dtype: torch.dtype) -> float | None:
    """Return the dense peak of a GPU in TFLOP/s by its driver's name; ``None`` when unknown."""
    known = tabulated_peak(gpu_name)
    if known is None:
        return None
    return {torch.bfloat16: known.bf16, torch.float32: known.fp32}.get(dtype)


def measure_tflops(
    device: torch.device, dtype: torch.dtype, seconds: float = MEASURE_SECONDS
) -> float:
    """Return the speed of a square matrix product, the best of the runs within ``seconds``.

    Args:
        device: where to multiply.
        dtype: of both factors and of the product.
        seconds: time to spend, after one run to warm up; at least one run is measured.

    Returns:
        TFLOP/s.
    """
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    times: list[float] = []
    _timed_product(a, b, product)
    while sum(times) < seconds:
        times.append(_timed_product(a, b, product))
    return 2 * size**3 / min(times) / 1e12


def _timed_product(a: torch.Tensor, b: torch.Tensor, product: torch.Tensor) -> float:
    """Return the seconds of one product; the device's queue is drained before and after it."""
    _drain(a.device)
    begin = time.perf_counter()
    torch.matmul(a, b, out=product)
    _drain(a.device)
    return time.perf_counter() - begin


def _drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
