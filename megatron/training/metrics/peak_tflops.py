"""The peak speed of one rank, which the model FLOPs utilisation (MFU) is a share of.

Taken from ``--peak-tflops``, else from a table of GPUs by name (dense, no sparsity), else from a
matrix product measured on the spot, which is what a CPU can do at best in practice.
"""

import time
from dataclasses import dataclass

import torch

from megatron.simulator.costs.gpus import tabulated_peak

MEASURE_SECONDS = 0.3


@dataclass(frozen=True)
class Peak:
    """Peak of one rank.

    Attributes:
        tflops: in TFLOP/s.
        source: where the figure comes from, for the log.
    """

    tflops: float
    source: str


def peak_of_rank(device: torch.device, dtype: torch.dtype, peak_tflops: float | None) -> Peak:
    """Find the peak of this rank.

    Args:
        device: what the rank computes on.
        dtype: ``torch.bfloat16`` or ``torch.float32``, of the matrix products.
        peak_tflops: the value of ``--peak-tflops``, which wins.

    Returns:
        The peak and its source. A measured one takes a few hundred milliseconds and holds for
        the load the machine is under at that moment: let all ranks measure at the same time.
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
    """Dense peak of a GPU by the name its driver gives, in TFLOP/s; ``None`` when unknown."""
    known = tabulated_peak(gpu_name)
    if known is None:
        return None
    return {torch.bfloat16: known.bf16, torch.float32: known.fp32}.get(dtype)


def measure_tflops(
    device: torch.device, dtype: torch.dtype, seconds: float = MEASURE_SECONDS
) -> float:
    """Speed of a square matrix product, the best of the runs that fit into ``seconds``.

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
    """Seconds of one product, the device's queue drained on both sides."""
    _drain(a.device)
    begin = time.perf_counter()
    torch.matmul(a, b, out=product)
    _drain(a.device)
    return time.perf_counter() - begin


def _drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
