"""The flags of products in 8 bits, by Megatron's names, and what they ask for together."""

from dataclasses import dataclass
from typing import Final, Literal

from megatron.config.declare import COUNT, NOT_NEGATIVE, flag
from megatron.layers.eight_bit_config import EightBitConfig, Recipe
from megatron.layers.eight_bits import Format

FORMAT: Final = "--fp8-format"
PACKAGE: Final = "--transformer-impl transformer_engine"
_NOT_DELAYED: Final = " or ".join(f"--fp8-recipe {r}" for r in ("tensorwise", "blockwise", "mxfp8"))
_ENDS: Final = "--first-last-layers-bf16"

# The formatter is off so that the flags read as a table.
# fmt: off


@dataclass(frozen=True)
class EightBitFlags:
    """Products of the linear layers in 8 bits."""

    fp8_format: Format | None = flag(None,
        "Multiply in 8 bits in the linear layers of attention and MLP. hybrid: inputs and weights "
        "in e4m3, gradients in e5m2; e4m3: all.", unset="no product is", needs="--bf16",
        lack="is for activations in bf16, as in Megatron")
    fp8_recipe: Recipe = flag("delayed",
        "Scales from the largest magnitudes of earlier iterations (delayed), of each tensor "
        "itself (tensorwise), or of its blocks of 128 or 32 numbers (blockwise, mxfp8).",
        idle_without=FORMAT)
    transformer_impl: Literal["local", "transformer_engine"] = flag("local",
        "What multiplies in 8 bits: PyTorch, or the package Transformer Engine where it is, which "
        "alone has scales of blocks.", idle_without=FORMAT)
    fp8_margin: int = flag(0, "Delayed scales are smaller by this power of two.", NOT_NEGATIVE,
        idle_without=FORMAT, idle_with=_NOT_DELAYED)
    fp8_amax_history_len: int = flag(1, "Iterations that delayed scaling remembers.", COUNT,
        idle_without=FORMAT, idle_with=_NOT_DELAYED)
    fp8_amax_compute_algo: Literal["most_recent", "max"] = flag("most_recent",
        "Delayed scales follow from the last of them, or from the largest.",
        idle_without=FORMAT, idle_with=_NOT_DELAYED)
    no_fp8_wgrad: bool = flag(False,
        "Form the gradients of the weights in bf16; inputs are then kept in bf16, too.",
        idle_without=FORMAT)
    first_last_layers_bf16: bool = flag(False,
        "Layers at both ends of the model stay in bf16.", idle_without=FORMAT)
    num_layers_at_start_in_bf16: int = flag(1, "How many do at the start.", NOT_NEGATIVE,
        idle_without=_ENDS)
    num_layers_at_end_in_bf16: int = flag(1, "How many do at the end.", NOT_NEGATIVE,
        idle_without=_ENDS)


# fmt: on
def eight_bit_config(flags: EightBitFlags, *, by_engine: bool) -> EightBitConfig | None:
    """Return what is in 8 bits; ``None``: nothing."""
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
