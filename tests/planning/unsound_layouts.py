"""Layouts of published models that no GPU of theirs can hold, whatever the plan: 10 of them.

A source says where the model is published, or that the layout cannot run. Parameters with their
gradients and optimizer states are enough to see it: 18 bytes a parameter where nothing is sharded,
2 of weight in bf16, 4 of gradient and 12 of Adam's states.
"""

from typing import Final, NamedTuple

from planning.public_layouts import (
    GPT_1T,
    GPT_22B,
    GPT_175B,
    LAST_AND_FIRST,
    LLAMA2_7B,
    LLAMA3_70B,
    LLAMA3_405B,
    RECIPE,
    SC21,
    SELECTED,
    SELECTIVE,
    SHARDED,
    WHOLE,
    PublicLayout,
    batch,
    by,
    gpt,
    llama,
    nemotron,
)


class Unsound(NamedTuple):
    """A layout that cannot run.

    Attributes:
        layout: the layout; its source says where the model or the statement is published.
        least: bytes that a GPU would hold at the very least, computed by hand in ``why``.
        why: the arithmetic.
    """

    layout: PublicLayout
    least: float
    why: str


def _too_large(
    name: str, source: str, gpu: str, gpus: int, flags: str, least: float, why: str
) -> Unsound:
    return Unsound(PublicLayout(f"{name} on {gpus}", source, gpu, gpus, flags), least, why)


UNSOUND: Final = (
    _too_large(
        "175B",
        f"{SELECTIVE}: with 64 GPUs",
        "A100",
        8,
        GPT_175B + by(8) + batch(1, 8) + SELECTED,
        392e9,
        "12 x 96 x 12288^2 + 51200 x 12288 = 174.6e9 parameters x 18 / 8",
    ),
    _too_large(
        "39.1B",
        f"{SC21}: with 512 GPUs",
        "A100",
        8,
        gpt(48, 8192, 64) + by(8) + batch(1, 8) + SELECTED,
        87e9,
        "12 x 48 x 8192^2 + 51200 x 8192 = 39.1e9 parameters x 18 / 8",
    ),
    _too_large(
        "Llama 3 70B, t 1, p 4, nothing sharded",
        f"{RECIPE}: with t 4, p 4, c 2 on 64 GPUs",
        "H100",
        16,
        LLAMA3_70B + by(1, 4) + batch(1, 128),
        308e9,
        "20 layers x (2 x 8192^2 + 2 x 8192 x 1024 + 3 x 8192 x 28672) x 18",
    ),
    _too_large(
        "Llama 3.1 405B",
        f"{RECIPE}: with t 8, p 8, c 2 on 1,024 GPUs",
        "H100",
        64,
        LLAMA3_405B + by(8, 8) + LAST_AND_FIRST + batch(1, 64) + " --sequence-parallel",
        114e9,
        "16 layers x (2 x 16384^2 + 2 x 16384 x 1024 + 3 x 16384 x 53248) / 8 x 18",
    ),
    _too_large(
        "Llama 2 7B, nothing sharded",
        "arXiv 1910.02054, figure 1: 120 GB of unsharded states of 7.5B, 16 bytes each",
        "H100",
        8,
        LLAMA2_7B + by(1) + batch(1, 128),
        121e9,
        "6.74e9 parameters x 18",
    ),
    _too_large(
        "GPT-2 XL, nothing sharded",
        "arXiv 1910.02054, section 3.1: 1.5B take at least 24 GB of states, 16 bytes each",
        "RTX4090",
        8,
        gpt(48, 1600, 25, 1024, 50257) + by(1) + batch(1, 8) + WHOLE,
        28e9,
        "12 x 48 x 1600^2 + 51281 x 1600 = 1.56e9 parameters x 18",
    ),
    _too_large(
        "Llama 3 70B, t 8",
        "ROCm llama3-70b launch list, made for GPUs of 192 GB",
        "H100",
        8,
        llama(80, 8192, 28672, 64, 8, 2048, 128256) + by(8) + batch(2, 8) + SHARDED,
        158e9,
        "70.55e9 parameters x 18 / 8: there is one replica, so nothing is sharded",
    ),
    _too_large(
        "22B on 40 GB",
        f"{SELECTIVE}, with half the memory",
        "A100-40GB",
        8,
        GPT_22B + by(8) + batch(4, 4, "fp16") + SELECTED,
        49e9,
        "12 x 48 x 6144^2 + 51200 x 6144 = 22.1e9 parameters x 18 / 8",
    ),
    _too_large(
        "1T, a quarter of the published GPUs",
        f"{SELECTIVE}: with 512 GPUs",
        "A100",
        128,
        GPT_1T + by(8, 16) + batch(1, 512, "fp16") + WHOLE,
        141e9,
        "8 layers x 12 x 25600^2 / 8 x 18",
    ),
    _too_large(
        "Nemotron-4 340B",
        "NVIDIA/dgxc-benchmarking, nemotron/README.md: at least 128 GPUs of 80 GB",
        "H100",
        64,
        nemotron(96, 18432, 96, 8) + by(8, 8, 12) + batch(1, 64) + SHARDED,
        93e9,
        "12 layers x (2 x 18432^2 + 2 x 18432 x 1536 + 2 x 18432 x 73728) / 8 x 18",
    ),
)
"""Layouts whose parameters, gradients and optimizer states exceed a GPU."""
