"""Products of the linear layers in 8 bits: flags, rules, and the library that multiplies.

The kernels multiply, or the package Transformer Engine ("the engine"), if the flags ask for it. For
experts the kernels multiply in any case.
"""

from dataclasses import dataclass
from typing import Final, Literal

from megatron.config.parallelism import ParallelFlags, number_of_replicas, on_cuda
from megatron.flags.declare import flag
from megatron.flags.groups import Flags
from megatron.flags.ranges import DEPTH_OR_NONE, Range, up_to
from megatron.kernels.cuda.transformer_engine import load_transformer_engine
from megatron.layers.eight_bit_config import EightBitConfig, Format, Recipe

FORMAT: Final = "--fp8-format"
PACKAGE: Final = "--transformer-impl transformer_engine"
GATHER: Final = "--fp8-param-gather"
_NOT_DELAYED: Final = " or ".join(f"--fp8-recipe {r}" for r in ("tensorwise", "blockwise", "mxfp8"))
_ENDS: Final = "--first-last-layers-bf16"
LEAST_CAPABILITY: Final = (8, 9)
"""Least compute capability of GPUs whose tensor cores multiply 8 bits: Ada, Hopper and later."""


# The formatter is off so that the flags read as a table.
# fmt: off
@dataclass(frozen=True)
class EightBitFlags:
    """Products of the linear layers in 8 bits."""

    fp8_format: Format | None = flag(None,
        "Multiply in 8 bits in the linear layers of attention, MLP and experts. hybrid: inputs "
        "and weights in e4m3 (4 bits of exponent, 3 of mantissa), gradients in e5m2; e4m3: inputs, "
        "weights and gradients in e4m3.",
        unset="16 bits", needs="--bf16",
        lack="is for activations in bf16, as in Megatron")
    fp8_recipe: Recipe = flag("delayed",
        "Source of the scales. delayed: the largest magnitudes of earlier iterations; tensorwise: "
        "each tensor itself; blockwise and mxfp8: blocks of 128 or 32 numbers of a tensor. Each "
        "expert has scales of its own.",
        idle_without=FORMAT)
    transformer_impl: Literal["local", "transformer_engine"] = flag("local",
        "What multiplies in 8 bits: this project's kernels and PyTorch (local), or the package "
        "Transformer Engine. Only the package has mxfp8. Experts multiply by this project's "
        "kernels either way.",
        idle_without=FORMAT)
    fp8_margin: int = flag(0, "Delayed scales are divided by 2 to this power.", Range(0, 16),
        idle_without=FORMAT, idle_with=_NOT_DELAYED)
    fp8_amax_history_len: int = flag(1, "Iterations that delayed scaling remembers.",
        up_to(1 << 16),
        idle_without=FORMAT, idle_with=_NOT_DELAYED)
    fp8_amax_compute_algo: Literal["most_recent", "max"] = flag("most_recent",
        "Magnitude that decides a delayed scale. most_recent: the largest of the last iteration; "
        "max: the largest of --fp8-amax-history-len iterations.",
        idle_without=FORMAT, idle_with=_NOT_DELAYED)
    fp8_param_gather: bool = flag(False,
        "Gather the updated weights of these layers in 8 bits, and hold only this replica's share "
        "of them in 16. This changes no value. It needs --use-distributed-optimizer. This "
        "project's kernels multiply then.",
        idle_without=FORMAT)
    no_fp8_wgrad: bool = flag(False,
        "Form the gradients of the weights in bf16; inputs are then kept in bf16, too.",
        idle_without=FORMAT)
    first_last_layers_bf16: bool = flag(False,
        "Leave layers at both ends of the model in bf16.", idle_without=FORMAT)
    num_layers_at_start_in_bf16: int = flag(1,
        "With --first-last-layers-bf16: layers in bf16 at the start of the model.", DEPTH_OR_NONE,
        idle_without=_ENDS)
    num_layers_at_end_in_bf16: int = flag(1,
        "With --first-last-layers-bf16: layers in bf16 at the end of the model.", DEPTH_OR_NONE,
        idle_without=_ENDS)
# fmt: on


def eight_bit_config(flags: EightBitFlags, *, by_engine: bool) -> EightBitConfig | None:
    """Return how layers multiply in 8 bits; ``None``: no layer does."""
    if flags.fp8_format is None:
        return None
    ends = flags.first_last_layers_bf16
    return EightBitConfig(
        form=flags.fp8_format,
        recipe=flags.fp8_recipe,
        margin=flags.fp8_margin,
        history=flags.fp8_amax_history_len,
        takes_largest=flags.fp8_amax_compute_algo == "max",
        wide_weight_gradients=flags.no_fp8_wgrad,
        wide_first=flags.num_layers_at_start_in_bf16 if ends else 0,
        wide_last=flags.num_layers_at_end_in_bf16 if ends else 0,
        transformer_engine=by_engine,
    )


def asks_for_engine(flags: Flags) -> bool:
    """Return whether the flags ask Transformer Engine to multiply."""
    own = flags[EightBitFlags]
    return own.fp8_format is not None and own.transformer_impl == "transformer_engine"


def lack_of_engine(flags: Flags) -> str | None:
    """Return why Transformer Engine cannot multiply on this machine; ``None``: it can."""
    if not on_cuda(flags):
        return "it multiplies on GPUs only"
    try:
        return load_transformer_engine().why_not(flags[EightBitFlags].fp8_recipe)
    except ValueError as error:
        return f"{error}; pip install --no-build-isolation transformer_engine[pytorch] may bring it"


def engine_multiplies(flags: Flags) -> bool:
    """Return whether Transformer Engine multiplies: flags ask for it, and nothing forbids it."""
    return asks_for_engine(flags) and not _gathers(flags) and lack_of_engine(flags) is None


def _gathers(flags: Flags) -> bool:
    """Return whether weights are gathered in 8 bits: a rank alone gathers nothing."""
    alike = number_of_replicas(flags) * flags[ParallelFlags].context_parallel_size
    return flags[EightBitFlags].fp8_param_gather and alike > 1
