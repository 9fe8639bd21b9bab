"""GPUs by name: what their data sheets say, and what of it measured runs attain.

Shares are those that 20 measured runs of Megatron-LM on A100s attain (docs/predictions.md): they
are assumed for the other GPUs as well, on which nothing was measured.
"""

from dataclasses import dataclass
from typing import Final

from megatron.simulator.costs.device import Device

GIB: Final = float(1 << 30)

ATTAINED: Final = {"forward": 0.672, "backward": 0.656, "output": 0.797}
"""Share of the peak that matrix products attain: those of layers, forward and backward, and the
three large ones of the output layer."""

ATTAINED_BANDWIDTH: Final = 0.77
"""Share of the memory bandwidth that elementwise kernels attain."""

LATENCY: Final = 328e-6
"""Seconds of a message between neighbours beside its way over the link."""


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        name: as in ``GPUS``.
        peak_tflops: dense bf16 products, TFLOP/s.
        memory: in bytes.
        bandwidth: of the memory, bytes/s.
        link: of one direction to a neighbour, bytes/s.
    """

    name: str
    peak_tflops: float
    memory: float
    bandwidth: float
    link: float

    def device(self) -> Device:
        """Return what passes attain on it."""
        return Device(
            peak_flops=1e12 * self.peak_tflops,
            attained={
                "forward": ATTAINED["forward"],
                "backward": ATTAINED["backward"],
                "output": ATTAINED["output"],
            },
            memory_bandwidth=ATTAINED_BANDWIDTH * self.bandwidth,
            link_bandwidth=self.link,
            link_latency=LATENCY,
        )


GPUS: Final = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", 312.0, 80 * GIB, 2.04e12, 300e9),
        Gpu("A100-40GB", 312.0, 40 * GIB, 1.555e12, 300e9),
        Gpu("H100", 989.0, 80 * GIB, 3.35e12, 450e9),
        Gpu("H200", 989.0, 140 * GIB, 4.8e12, 450e9),
        Gpu("B200", 2250.0, 179 * GIB, 8.0e12, 900e9),
        Gpu("L40S", 362.0, 45 * GIB, 0.864e12, 32e9),
        Gpu("RTX4090", 165.2, 24 * GIB, 1.008e12, 32e9),
    )
}
"""Name -> GPU, from the vendor's data sheets: SXM modules with NVLink, the last two over PCIe 4."""


def gpu(name: str) -> Gpu:
    """Return the GPU of that name, whatever its case.

    Raises:
        ValueError: if there is none, naming those there are.
    """
    for known, found in GPUS.items():
        if known.lower() == name.lower():
            return found
    raise ValueError(f"--dry-run-gpu {name} is not known: choose one of {', '.join(GPUS)}")
