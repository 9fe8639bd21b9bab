"""Whether Transformer Engine multiplies: it is asked for, and is here with a GPU that it knows."""

from megatron.config.cluster_rules import on_cuda
from megatron.config.declare import Flags
from megatron.config.eight_bit_flags import EightBitFlags
from megatron.kernels.cuda.transformer_engine import load_transformer_engine


def asks_for_engine(flags: Flags) -> bool:
    """Return whether Transformer Engine shall multiply."""
    own = flags[EightBitFlags]
    return own.fp8_format is not None and own.transformer_impl == "transformer_engine"


def lack_of_engine(flags: Flags) -> str | None:
    """Return what this machine lacks for Transformer Engine's products; ``None``: nothing."""
    if not on_cuda(flags):
        return "it multiplies on GPUs only"
    try:
        return load_transformer_engine().why_not(flags[EightBitFlags].fp8_recipe)
    except ValueError as error:
        return f"{error}; pip install --no-build-isolation transformer_engine[pytorch] may bring it"


def engine_multiplies(flags: Flags) -> bool:
    """Return whether Transformer Engine does multiply."""
    return asks_for_engine(flags) and lack_of_engine(flags) is None
