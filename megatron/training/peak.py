"""The peak speed of one rank, which the model FLOPs utilisation (MFU) is a share of.

Taken from ``--peak-tflops``, else from a table of GPUs by name (dense, no sparsity), else from a
matrix product measured on the spot, which is what a CPU can do at best in practice.
"""

import re
import time
from dataclasses import dataclass

import torch

# Name pattern, dense bf16 TFLOP/s, fp32 TFLOP/s without TF32 (PyTorch's default). First match
# wins, so variants stand before their family. Sources: the vendor's data sheets. GPUs without
# bf16 units (V100, T4) are left out: they are measured.
_GPUS: tuple[tuple[str, float, float], ...] = (
    (r"GB200", 2500.0, 80.0),
    (r"B200", 2250.0, 80.0),
    (r"GH200|H200", 989.0, 67.0),
    (r"H100.*NVL", 835.0, 60.0),
    (r"H100.*PCIe", 756.0, 51.0),
    (r"H100|H800", 989.0, 67.0),
    (r"H20\b", 148.0, 44.0),
    (r"A100|A800", 312.0, 19.5),
    (r"A40\b", 149.7, 37.4),
    (r"A30\b", 165.0, 10.3),
    (r"A10\b", 125.0, 31.2),
    (r"A6000\b", 154.8, 38.7),
    (r"L40S\b", 362.0, 91.6),
    (r"L40\b", 181.0, 90.5),
    (r"L4\b", 121.0, 30.3),
    (r"RTX 4090\b", 165.2, 82.6),
    (r"RTX 3090\b", 71.0, 35.6),
)

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
    column = {torch.bfloat16: 0, torch.float32: 1}.get(dtype)
    if column is None:
        return None
    for pattern, *tflops in _GPUS:
        if re.search(rf"\b(?:{pattern})", gpu_name):
            return tflops[column]
    return None


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
