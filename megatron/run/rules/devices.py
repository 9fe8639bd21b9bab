"""Flags that ranks on CPUs have no use for."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from megatron.flags.groups import Flags, declarations
from megatron.flags.rules import notes_in
from megatron.parallel.settings import BlockSettings, DeviceSettings
from megatron.run.log import LogSettings
from megatron.run.parallelism import on_cuda
from megatron.run.precision import PrecisionSettings
from megatron.run.train import TrainSettings
from megatron.simulator.costs.settings import ClusterSettings

CPUINFO: Final = Path("/proc/cpuinfo")
"""Linux's description of the CPU."""


@notes_in("real")
def _narrow_products_on_cpus(flags: Flags) -> Iterator[str]:
    for is_asked, name in (
        (flags[PrecisionSettings].bf16, "bf16"),
        (flags[PrecisionSettings].fp16, "fp16"),
    ):
        if is_asked and not on_cuda(flags) and not _cpu_multiplies(name):
            yield (
                f"--{name} makes this run slower: this CPU has no instructions for {name} products "
                f"(avx512_{name}, amx_{name}); fp32 is faster here, {name} saves memory"
            )


def _cpu_multiplies(name: str) -> bool:
    """Return whether the CPU has instructions for products in this dtype; if unknown, say yes."""
    if not CPUINFO.is_file():
        return True
    words = set(CPUINFO.read_text(encoding="utf-8", errors="replace").split())
    on_arm = {"bf16": "bf16", "fp16": "asimdhp"}[name]
    return not words.isdisjoint((f"avx512_{name}", f"amx_{name}", on_arm))


_GLOO: Final = "ranks on CPUs communicate with gloo"


_FREE: Final = "ranks on CPUs plan with free communication, until its time is measured"


_IDLE_ON_CPUS: Final[Mapping[type, Mapping[str, str]]] = {
    DeviceSettings: {"deterministic_mode": "runs on CPUs are the same to the last bit"},
    PrecisionSettings: {"fp32_matmul_precision": "CPUs multiply fp32 as it is"},
    BlockSettings: {
        "nccl_max_ctas_p2p": _GLOO,
        "nccl_max_ctas_vocab": _GLOO,
        "nccl_max_ctas_data": _GLOO,
    },
    ClusterSettings: {
        "no_numa_binding": "ranks on CPUs are bound to none",
        "link_bandwidth": _FREE,
        "link_latency": _FREE,
        "network_bandwidth": _FREE,
        "network_latency": _FREE,
    },
    LogSettings: {"record_memory_history": "PyTorch remembers allocations on GPUs only"},
    TrainSettings: {"use_cpu_initialization": "ranks on CPUs draw their weights there"},
}
"""For each flag that changes nothing on CPUs, the reason."""


@notes_in("real")
def _idle_on_cpus(flags: Flags) -> Iterator[str]:
    for group, reasons in _IDLE_ON_CPUS.items() if not on_cuda(flags) else ():
        for declared in declarations(group):
            reason = reasons.get(declared.name)
            if reason and (value := getattr(flags[group], declared.name)) != declared.default:
                yield f"{declared.shown(value)} changes nothing: {reason}"
