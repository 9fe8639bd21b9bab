"""NUMA: a rank runs on the CPUs that are close to its GPU.

Data for the GPU lies in the memory of the CPU that wrote it. Each NUMA node is a group of CPUs with
a memory of its own. From another node the data takes a longer way, which other ranks use too.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SYSFS: Final = Path("/sys/bus/pci/devices")


def place_on_pci(properties: object) -> tuple[int, int, int] | None:
    """Return domain, bus and device of a GPU; ``None`` if this PyTorch does not tell.

    Args:
        properties: result of ``torch.cuda.get_device_properties``. In older releases of PyTorch it
            lacks these numbers, and PyTorch's type hints lack them still.
    """
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    found = [getattr(properties, name, None) for name in names]
    known = [number for number in found if isinstance(number, int)]
    if len(known) < len(names):
        return None
    domain, bus, device = known
    return domain, bus, device


def bind_to_gpu(gpu: tuple[int, int, int] | None, sysfs: Path = SYSFS) -> str:
    """Let this process run only on CPUs that are close to a GPU; return a line about the outcome.

    Threads that run already stay where they are. CPUs that a launcher forbids stay forbidden.

    Args:
        gpu: where this rank's GPU is (``place_on_pci``).
        sysfs: folder of Linux with PCI devices by their addresses.
    """
    if gpu is None:
        return "CPUs are not bound to GPUs: this PyTorch does not tell where a GPU is"
    domain, bus, device = gpu
    address = f"{domain:04x}:{bus:02x}:{device:02x}.0"
    if not hasattr(os, "sched_setaffinity"):
        return "CPUs are not bound to GPUs: this system cannot bind processes"
    try:
        node = int((sysfs / address / "numa_node").read_text())
        close = set(cpus_of((sysfs / address / "local_cpulist").read_text()))
    except (OSError, ValueError) as error:
        return (
            f"CPUs are not bound to GPUs: {sysfs / address} does not tell which are close ({error})"
        )
    if node < 0:
        return f"CPUs are not bound to GPUs: GPU {address} is close to no NUMA node in particular"
    allowed = os.sched_getaffinity(0)
    chosen = close & allowed
    if not chosen:
        return (
            f"CPUs are not bound to GPUs: of those close to GPU {address} the launcher allows "
            "none; let it bind ranks by GPU, or not at all"
        )
    os.sched_setaffinity(0, chosen)
    return f"CPUs are bound to GPUs: GPU {address} to {len(chosen)} CPUs of NUMA node {node}"


def cpus_of(text: str) -> Iterator[int]:
    """Yield the numbers of a list as Linux writes it, such as ``0-3,8``.

    Raises:
        ValueError: the text is no such list.
    """
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
