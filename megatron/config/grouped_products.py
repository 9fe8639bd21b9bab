"""Which package multiplies the slots of experts: the rules about --moe-grouped-products."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import torch

from megatron.config.eight_bits import FORMAT, EightBitFlags
from megatron.config.experts import is_mixture
from megatron.config.parallelism import on_cuda
from megatron.config.precision import activation_dtype
from megatron.flags.declare import flag
from megatron.flags.groups import Flags
from megatron.flags.rules import notes, refuses, refuses_in
from megatron.kernels.cuda.grouped_packages import TYPES, PackageName, load_grouped_package

GROUPED: Final = "--moe-grouped-products"
"""The flag that says what multiplies experts."""

_BRINGS: Final = {
    "transformer_engine": "pip install --no-build-isolation transformer_engine[pytorch]",
    "grouped_gemm": "pip install --no-build-isolation grouped_gemm",
}
"""For each package a command that may install it."""


@dataclass(frozen=True)
class GroupedFlags:
    """Products of experts."""

    # fmt: off
    moe_grouped_products: Literal["local", "transformer_engine", "grouped_gemm"] = flag("local",
        "What multiplies experts in 16 bits and fp32: PyTorch and this project's kernels (local), "
        "or a package: Transformer Engine (16 bits) or grouped_gemm (bf16). For a package the host "
        "waits once a layer and microbatch to learn how many tokens each expert has.",
        idle_without="--num-experts")
    # fmt: on


def grouped_package(flags: Flags) -> PackageName | None:
    """Return the package that multiplies the slots of experts; ``None``: the kernels do."""
    asked = flags[GroupedFlags].moe_grouped_products
    if asked == "local" or not is_mixture(flags) or _in_eight_bits(flags):
        return None
    return asked


def _in_eight_bits(flags: Flags) -> bool:
    return flags[EightBitFlags].fp8_format is not None


@refuses
def _type(flags: Flags) -> Iterator[str]:
    package = grouped_package(flags)
    if package is not None and activation_dtype(flags) not in TYPES[package]:
        can = {torch.bfloat16: "--bf16", torch.float16: "--fp16"}
        asked = " or ".join(can[dtype] for dtype in TYPES[package])
        yield (
            f"{GROUPED} {package}: that package does not multiply this type, or rounds it to TF32: "
            f"add {asked}, or leave it out"
        )


@refuses_in("real")
def _of_device(flags: Flags) -> Iterator[str]:
    package = grouped_package(flags)
    if package is None:
        return
    if not on_cuda(flags):
        yield f"{GROUPED} {package}: that package multiplies on GPUs only: leave it out"
        return
    try:
        load_grouped_package(package)
    except ValueError as error:
        yield (
            f"{GROUPED} {package}: {error}; {_BRINGS[package]} may bring it, or leave it out, and "
            "this project's kernels multiply"
        )


@notes
def _beside_eight_bits(flags: Flags) -> Iterator[str]:
    own = flags[GroupedFlags].moe_grouped_products
    if own != "local" and is_mixture(flags) and _in_eight_bits(flags):
        yield f"{GROUPED} {own} changes nothing beside {FORMAT}: kernels multiply all experts then"
