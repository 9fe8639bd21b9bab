"""Products of the linear layers in 8 bits, and the library that multiplies.

The kernels multiply, or the package Transformer Engine ("the engine"), if the flags ask for it. For
experts the kernels multiply in any case.
"""

from dataclasses import replace
from typing import Final

from megatron.flags.groups import Flags
from megatron.kernels.cuda.transformer_engine import load_transformer_engine
from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.parallel.context_settings import ContextRankSettings
from megatron.run.parallelism import number_of_replicas, on_cuda

PACKAGE: Final = "--transformer-impl transformer_engine"
LEAST_CAPABILITY: Final = (8, 9)
"""Least compute capability of GPUs whose tensor cores multiply 8 bits: Ada, Hopper and later."""


def eight_bits_of(flags: Flags) -> EightBitSettings | None:
    """Return how layers multiply in 8 bits; ``None``: no layer does."""
    own = flags[EightBitSettings]
    if own.fp8_format is None:
        return None
    return replace(own, transformer_engine=engine_multiplies(flags))


def asks_for_engine(flags: Flags) -> bool:
    """Return whether the flags ask Transformer Engine to multiply."""
    own = flags[EightBitSettings]
    return own.fp8_format is not None and own.transformer_impl == "transformer_engine"


def lack_of_engine(flags: Flags) -> str | None:
    """Return why Transformer Engine cannot multiply on this machine; ``None``: it can."""
    if not on_cuda(flags):
        return "it multiplies on GPUs only"
    try:
        return load_transformer_engine().why_not(flags[EightBitSettings].fp8_recipe)
    except ValueError as error:
        return f"{error}; pip install --no-build-isolation transformer_engine[pytorch] may bring it"


def engine_multiplies(flags: Flags) -> bool:
    """Return whether Transformer Engine multiplies: flags ask for it, and nothing forbids it."""
    return asks_for_engine(flags) and not gathers(flags) and lack_of_engine(flags) is None


def gathers(flags: Flags) -> bool:
    """Return whether weights are gathered in 8 bits: a rank alone gathers nothing."""
    alike = number_of_replicas(flags) * flags[ContextRankSettings].size
    return flags[EightBitSettings].fp8_param_gather and alike > 1
