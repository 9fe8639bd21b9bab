"""GPUs by name: data sheets, and the shares of the data sheets that kernels and links attain."""

import re
from dataclasses import dataclass
from typing import Final

from megatron.simulator.costs.collective_time import LINK_STEP, NETWORK_STEP, Links, Path
from megatron.simulator.costs.launch_time import BLOCK_WEIGHTS, BLOCKS, EIGHT_BITS, MX, Rates

GIB: Final = float(1 << 30)

USABLE: Final = 0.95
"""Share of a GPU's memory that tensors and communicators can use; the rest goes to CUDA and
fragments: of 80 GiB 76.0. Messages of PyTorch that memory has run out, which users of GPUs of 80
GiB have published, give 79.1 to 79.3 GiB as the whole, and 0.5 to 1.1 outside of PyTorch without
communicators. Tensors held 75.1 to 77.9 GiB and fragments 0.0 to 2.2 in four of them, and 71.7 and
5.9 in a fifth. Segments that grow (``parallel/environment.py``) leave fewer fragments."""

WORKSPACE: Final = 2 * 4096 * 1024 + 8 * 16 * 1024
HOPPER_WORKSPACE: Final = 32 * 1024 * 1024
"""Bytes of memory that PyTorch lends cuBLAS for products, by default: for each thread that
multiplies, on each stream that it uses, and never given back. The larger one is for compute
capability 9; PyTorch 2.12 and later have it for newer GPUs too. Source: ``CublasHandlePool.cpp`` of
PyTorch; ``CUBLAS_WORKSPACE_CONFIG`` changes it. NVIDIA recommends 4 and 32 MiB (documentation of
``cublasSetWorkspace``). Measured on an H200 with PyTorch 2.11: docs/predictions.md."""

WORKSPACES: Final = 2
"""Workspaces of a rank: the thread of the passes multiplies, and so does the thread of autograd,
both on the stream of the passes."""

_PEAKS: Final = (
    (r"GB300", 2500.0, 5000.0, 80.0),
    (r"GB200", 2500.0, 5000.0, 80.0),
    (r"B300", 2250.0, 4500.0, 75.0),
    (r"B200", 2250.0, 4500.0, 80.0),
    (r"GH200|H200", 989.0, 1979.0, 67.0),
    (r"H100.*NVL", 835.0, 1671.0, 60.0),
    (r"H100.*PCIe", 756.0, 1513.0, 51.0),
    (r"H100|H800", 989.0, 1979.0, 67.0),
    (r"H20\b", 148.0, 296.0, 44.0),
    (r"A100|A800", 312.0, 0.0, 19.5),
    (r"A40\b", 149.7, 0.0, 37.4),
    (r"A30\b", 165.0, 0.0, 10.3),
    (r"A10\b", 125.0, 0.0, 31.2),
    (r"A6000\b", 154.8, 0.0, 38.7),
    (r"L40S\b", 362.0, 733.0, 91.6),
    (r"L40\b", 181.0, 362.0, 90.5),
    (r"L4\b", 121.0, 242.0, 30.3),
    (r"RTX ?4090\b", 165.2, 330.3, 82.6),
    (r"RTX ?3090\b", 71.0, 0.0, 35.6),
    (r"MI355X", 2516.6, 5033.2, 157.3),
    (r"MI300X", 1307.4, 2614.9, 163.4),
)
"""Name pattern, dense bf16 TFLOP/s, dense TFLOP/s of floating-point numbers of 8 bits (0: the
tensor cores do not multiply them), fp32 TFLOP/s without TF32 (PyTorch's default). The first match
wins, so variants stand before their family. Sources: the vendors' data sheets. GPUs without bf16
units (V100, T4) are left out."""


@dataclass(frozen=True)
class PeakTflops:
    """Peaks of matrix products without sparsity, in TFLOP/s, by the dtype of the factors."""

    bf16: float
    eight_bits: float
    fp32: float


def tabulated_peak(name: str) -> PeakTflops | None:
    """Return the peaks of a GPU, by its own name or by the driver's name, if it is known."""
    for pattern, *peaks in _PEAKS:
        if re.search(rf"\b(?:{pattern})", name):
            return PeakTflops(*peaks)
    return None


@dataclass(frozen=True)
class Shares:
    """Shares of the data sheet that the kernels of a generation of GPUs attain under hours of load.

    Attributes:
        products: of the peak, by matrix products in full waves of tiles.
        attention: of the peak, by attention in one kernel.
        memory: of the memory's bandwidth.
        eight_bits: speed of products of 8-bit factors over products of 16-bit factors.
    """

    products: float
    attention: float
    memory: float
    eight_bits: float = EIGHT_BITS


AMPERE: Final = Shares(0.8, 0.32, 0.7)
"""Calibrated on published runs and on the pass times of 8 A100s (docs/predictions.md)."""

HOPPER: Final = Shares(0.64, 0.55, 0.8)
BLACKWELL: Final = Shares(0.58, 0.55, 0.8)
BLACKWELL_ULTRA: Final = Shares(0.78, 0.55, 0.8)
"""Calibrated on iterations of 2024 to 2026, of dense models (``calibrate_shared.py`` in
``tools/predictions``): H100; B200 and GB200; B300 and GB300. An H200 that was busy for seconds only
attained 0.74 of its peak: under load for hours a GPU lowers its clock to stay within its power."""

_SHARES: Final = {
    **dict.fromkeys(("H100", "H200", "MI300X", "MI355X"), HOPPER),
    **dict.fromkeys(("B200", "GB200"), BLACKWELL),
    **dict.fromkeys(("B300", "GB300"), BLACKWELL_ULTRA),
}
"""Shares by GPU; other GPUs have the shares of an A100. Nobody has measured the two of AMD."""

KERNEL_GAP: Final = 5e-6
"""Seconds from the end of a kernel's work to the begin of the next one's, in a queue that the host
keeps filled: begin and end of a kernel, in which not all multiprocessors work. Calibrated likewise.
The time of the host is not in it. A host needs longer for a launch: 77 us were measured on one
machine (``planning/launch_pace.py``). So the host adds nothing only where kernels are
long, and a dry run says where they may be too short."""

LINK_SHARE: Final = 0.78
NETWORK_SHARE: Final = 0.8
"""Shares of the data sheet that rings of NCCL attain within a machine and between machines: 234
GB/s of 300 over the NVLinks of an A100, and 20 of 25 over its network adapter. Both were chosen,
the second of 0.7, 0.8 and 0.92 by the published runs with replicas. Users report 200 and 208 GB/s
of all-reduces on 8 A100s (github.com/NVIDIA/nccl-tests, issues 149 and 178)."""

HOST_SHARE: Final = 0.8
"""Share of the bus's line rate that copies of pinned memory attain, one direction at a time. An
assumption: 25 GB/s of the 32 of PCIe 4. GPUs that share a switch of PCIe have less: PipeOffload
(arXiv 2503.01328) plans with 15 GB/s for each A100. ``--host-bandwidth`` gives a measured one."""

HOST_MEMORY: Final = 2 * 8 * 38.4e9 / 8
"""Bytes/s of the host's memory for every GPU: the line rate of a DGX H100, whose two CPUs have
eight channels of DDR5-4800 each (8 bytes x 4800 MT/s) for eight GPUs. Nobody has measured the share
that a step on the host attains; one core attains 17 GB/s (``kernels/reference/optimizer.py``)."""

_AS_HOPPER: Final = frozenset(_SHARES)
"""GPUs with workspaces as large as an H100's; others have an A100's. Nobody has measured this for
the two GPUs of AMD, which multiply by AMD's libraries."""

_HOPPER: Final = frozenset({"H100", "H200"})
"""GPUs for which cuBLAS multiplies with scales of blocks in fp32."""


_BLACKWELL: Final = frozenset({"B200", "GB200", "B300", "GB300"})


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        name: its name in ``GPUS``.
        memory: size of the memory, in bytes.
        bandwidth: bandwidth of the memory, in bytes/s.
        link: bandwidth of one direction to a neighbour, in bytes/s.
        network: bandwidth of one direction of its network adapter, in bytes/s.
        multiprocessors: number of multiprocessors.
        bus: line rate of one direction of its bus to the host, in bytes/s.
        machine: GPUs of a machine that has this GPU.
        domain: GPUs that ``link`` connects, in several machines; 0: those of one machine.
    """

    name: str
    memory: float
    bandwidth: float
    link: float
    network: float
    multiprocessors: int
    bus: float
    machine: int = 8
    domain: int = 0

    @property
    def rates(self) -> Rates:
        """The rates at which such a GPU runs kernels."""
        shares = _SHARES.get(self.name, AMPERE)
        return Rates(
            peak_flops=1e12 * self.peak_tflops,
            multiprocessors=self.multiprocessors,
            memory_bandwidth=self.bandwidth,
            product_share=shares.products,
            attention_share=shares.attention,
            memory_share=shares.memory,
            gap=KERNEL_GAP,
            eight_bits=shares.eight_bits if self.multiplies_eight_bits else 1.0,
            blocks=BLOCKS if self.has_block_products else 1.0,
            block_weights=BLOCK_WEIGHTS if self.has_block_products else 1.0,
            mx=MX if self.has_mx_products else 1.0,
        )

    def links(
        self,
        link: tuple[float | None, float | None] = (None, None),
        network: tuple[float | None, float | None] = (None, None),
    ) -> Links:
        """Return the links between GPUs of this kind.

        Args:
            link: bytes/s that communications attain within a machine, and seconds of a step;
                ``None``: the value assumed for this GPU.
            network: bytes/s and seconds of a step between machines; ``None`` as for ``link``.
        """
        return Links(
            Path(_given(link[0], LINK_SHARE * self.link), _given(link[1], LINK_STEP)),
            Path(
                _given(network[0], NETWORK_SHARE * self.network), _given(network[1], NETWORK_STEP)
            ),
        )

    @property
    def host(self) -> float:
        """Assumed speed of copies between the GPU and its host, in bytes/s."""
        return HOST_SHARE * self.bus

    @property
    def multiplies_eight_bits(self) -> bool:
        """Whether its tensor cores multiply numbers of 8 bits; a run in 8 bits is refused else."""
        return self.peaks.eight_bits > 0

    @property
    def has_cudnn(self) -> bool:
        """Whether cuDNN's attention is the fastest one: on Hopper and on Blackwell."""
        return self.name in _HOPPER | _BLACKWELL

    @property
    def has_block_products(self) -> bool:
        """Whether cuBLAS multiplies in 8 bits with scales of blocks in fp32."""
        return self.name in _HOPPER

    @property
    def has_mx_products(self) -> bool:
        """Whether cuBLAS multiplies in 8 bits with one scale for 32 numbers: on Blackwell."""
        return self.name in _BLACKWELL

    @property
    def workspaces(self) -> float:
        """Bytes that PyTorch lends cuBLAS on a rank; see ``WORKSPACES``."""
        return WORKSPACES * (HOPPER_WORKSPACE if self.name in _AS_HOPPER else WORKSPACE)

    @property
    def usable(self) -> float:
        """Bytes of memory that tensors can use."""
        return USABLE * self.memory

    @property
    def peaks(self) -> PeakTflops:
        """Peaks of its products."""
        peaks = tabulated_peak(self.name)
        assert peaks is not None, f"{self.name} has no peak in the table"
        return peaks

    @property
    def peak_tflops(self) -> float:
        """Peak of dense bf16 products, in TFLOP/s."""
        return self.peaks.bf16


GPUS: Final = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100", 80 * GIB, 2.04e12, 300e9, 25e9, 108, 32e9),
        Gpu("A100-40GB", 40 * GIB, 1.555e12, 300e9, 25e9, 108, 32e9),
        Gpu("H100", 80 * GIB, 3.35e12, 450e9, 50e9, 132, 64e9),
        Gpu("H200", 140 * GIB, 4.8e12, 450e9, 50e9, 132, 64e9),
        Gpu("B200", 179 * GIB, 8.0e12, 900e9, 50e9, 148, 64e9),
        Gpu("B300", 268 * GIB, 8.0e12, 900e9, 100e9, 148, 64e9),
        Gpu("GB200", 185 * GIB, 8.0e12, 900e9, 50e9, 152, 225e9, machine=4, domain=72),
        Gpu("GB300", 277 * GIB, 8.0e12, 900e9, 100e9, 152, 225e9, machine=4, domain=72),
        Gpu("L40S", 45 * GIB, 0.864e12, 32e9, 12.5e9, 142, 32e9),
        Gpu("RTX4090", 24 * GIB, 1.008e12, 32e9, 12.5e9, 128, 32e9),
        Gpu("MI300X", 191 * GIB, 5.3e12, 448e9, 50e9, 304, 64e9),
        Gpu("MI355X", 287 * GIB, 8.0e12, 537.6e9, 50e9, 256, 64e9),
    )
}
"""Name -> GPU, from the vendors' data sheets: SXM modules with NVLink; L40S and RTX4090 over PCIe
4; and AMD's modules, each with a link of 64 or 76.8 GB/s to each of the 7 others of its machine.
The memory is the size that the driver gives, in whole GiB.

The network is that of the vendor's own machines, a network adapter for each GPU at its line rate:
200 Gb/s in a DGX A100; 400 Gb/s in a DGX H100, H200 or B200, in a GB200 NVL72 and beside AMD's
GPUs; 800 Gb/s in a DGX B300 and a GB300 NVL72. Machines of L40S and RTX4090 differ; 100 Gb/s for
each GPU is an assumption. The bus has 16 lanes, of PCIe 5 (64 GB/s) for the H100, H200, B200, B300
and AMD's GPUs, of PCIe 4 (32 GB/s) for the others; a Grace CPU has 450 GB/s for its two GPUs. In an
NVL72, 18 machines of 4 GPUs share one domain of NVLink."""


def gpu_of_driver(name: str) -> Gpu | None:
    """Return the GPU that the driver calls ``name``, such as "NVIDIA H100 80GB HBM3", if known.

    If a GPU exists with several sizes of memory, the largest is returned.
    """
    words = name.replace("RTX ", "RTX")
    return next((own for own in GPUS.values() if re.search(rf"\b{own.name}\b", words)), None)


def _given(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def gpu(name: str) -> Gpu:
    """Return the GPU with this name, in upper or lower case.

    Raises:
        ValueError: if no GPU has this name; the message names all GPUs.
    """
    for known, found in GPUS.items():
        if known.lower() == name.lower():
            return found
    raise ValueError(f"--dry-run-gpu {name} is not known: choose one of {', '.join(GPUS)}")
