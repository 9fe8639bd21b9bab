"""The settings of kernels."""

from dataclasses import dataclass
from typing import Literal

from megatron.flags.declare import flag


@dataclass(frozen=True)
class GroupedProductSettings:
    """Products of experts."""

    # fmt: off
    moe_grouped_products: Literal["local", "transformer_engine", "grouped_gemm"] = flag("local",
        "What multiplies experts in 16 bits and fp32: PyTorch and this project's kernels (local), "
        "or a package: Transformer Engine (16 bits) or grouped_gemm (bf16). For a package the host "
        "waits once a layer and microbatch to learn how many tokens each expert has.",
        idle_without="--num-experts")
    # fmt: on
