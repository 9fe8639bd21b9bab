"""Which package multiplies the slots of experts."""

from typing import Final

from megatron.flags.groups import Flags
from megatron.kernels.cuda.grouped_packages import PackageName
from megatron.kernels.settings import GroupedProductSettings
from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.run.experts import is_mixture

GROUPED: Final = "--moe-grouped-products"
"""The flag that says what multiplies experts."""


def grouped_package(flags: Flags) -> PackageName | None:
    """Return the package that multiplies the slots of experts; ``None``: the kernels do."""
    asked = flags[GroupedProductSettings].moe_grouped_products
    if asked == "local" or not is_mixture(flags) or in_eight_bits(flags):
        return None
    return asked


def in_eight_bits(flags: Flags) -> bool:
    """Return whether layers multiply in 8 bits."""
    return flags[EightBitSettings].fp8_format is not None
