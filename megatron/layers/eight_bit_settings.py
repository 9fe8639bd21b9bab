"""The settings of products in 8 bits, and facts of recipes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch

from megatron.flags.declare import flag, spelled, spells
from megatron.flags.groups import Flags
from megatron.flags.ranges import DEPTH_OR_NONE, Range, up_to
from megatron.flags.rules import refuses
from megatron.kernels.eight_bits import BLOCK, E4M3, E5M2
from megatron.layers.scales import GRADIENT, INPUT, WEIGHT, Role

Format = Literal["e4m3", "hybrid"]
"""The 8-bit types: ``e4m3`` for all factors, or ``hybrid`` with e5m2 for gradients."""

Recipe = Literal["tensorwise", "delayed", "blockwise", "mxfp8"]
"""The source of scales."""

BLOCKS: Final[Mapping[str, int]] = {"blockwise": BLOCK, "mxfp8": 32}
"""For each recipe with scales of blocks, how many numbers of a row or a column share a scale."""

WITHOUT_EXPERTS: Final[frozenset[Recipe]] = frozenset({"mxfp8"})
"""Recipes without products of experts."""

GATHERED: Final[frozenset[Recipe]] = frozenset({"tensorwise", "delayed", "blockwise"})
"""Recipes whose weights replicas can gather in 8 bits. Columns of mxfp8 are not those of its
rows."""


FORMAT: Final = "--fp8-format"
GATHER: Final = "--fp8-param-gather"
_NOT_DELAYED: Final = " or ".join(f"--fp8-recipe {r}" for r in ("tensorwise", "blockwise", "mxfp8"))
ENDS: Final = "--first-last-layers-bf16"


def types_of(form: Format) -> dict[Role, torch.dtype]:
    """Return the 8-bit type of each factor."""
    return {INPUT: E4M3, WEIGHT: E4M3, GRADIENT: E5M2 if form == "hybrid" else E4M3}


@dataclass(frozen=True)
class EightBitSettings:
    """Products of the linear layers in 8 bits.

    Attributes:
        transformer_engine: Transformer Engine forms the products; otherwise the kernels do.
    """

    # fmt: off
    fp8_format: Format | None = flag(None,
        "Multiply in 8 bits in the linear layers of attention, MLP and experts. hybrid: inputs "
        "and weights in e4m3 (4 bits of exponent, 3 of mantissa), gradients in e5m2; e4m3: inputs, "
        "weights and gradients in e4m3.",
        unset="16 bits", needs="--bf16",
        lack="is for activations in bf16, as in Megatron")
    fp8_recipe: Recipe = flag("delayed",
        "Source of the scales. delayed: the largest magnitudes of earlier iterations; tensorwise: "
        "each tensor itself; blockwise and mxfp8: blocks of 128 or 32 numbers of a tensor. mxfp8 "
        "multiplies on GPUs of compute capability 10 (Blackwell). Each expert has scales of its "
        "own; mxfp8 has no experts.",
        idle_without=FORMAT)
    transformer_impl: Literal["local", "transformer_engine"] = flag("local",
        "What multiplies in 8 bits: this project's kernels and PyTorch (local), or the package "
        "Transformer Engine. Experts multiply by this project's kernels either way.",
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
    wide_weight_gradients: bool = spelled(False, spells("--no-fp8-wgrad", True,
        "Form the gradients of the weights in bf16; inputs are then kept in bf16, too.",
        idle_without=FORMAT))
    first_last_layers_bf16: bool = flag(False,
        "Leave layers at both ends of the model in bf16.", idle_without=FORMAT)
    num_layers_at_start_in_bf16: int = flag(1,
        "With --first-last-layers-bf16: layers in bf16 at the start of the model.", DEPTH_OR_NONE,
        idle_without=ENDS)
    num_layers_at_end_in_bf16: int = flag(1,
        "With --first-last-layers-bf16: layers in bf16 at the end of the model.", DEPTH_OR_NONE,
        idle_without=ENDS)
    # fmt: on

    transformer_engine: bool = False

    @property
    def form(self) -> Format:
        """8-bit types of the factors, if layers multiply in 8 bits."""
        assert self.fp8_format is not None, "no layer multiplies in 8 bits"
        return self.fp8_format

    @property
    def wide_first(self) -> int:
        """Layers at the model's start that use the activations' dtype."""
        return self.num_layers_at_start_in_bf16 if self.first_last_layers_bf16 else 0

    @property
    def wide_last(self) -> int:
        """Layers at the model's end that use the activations' dtype."""
        return self.num_layers_at_end_in_bf16 if self.first_last_layers_bf16 else 0

    def has(self, layer: int, layers: int) -> bool:
        """Return whether the layer with index ``layer`` is in 8 bits; layers after the end are."""
        return self.wide_first <= layer < layers - self.wide_last or layer >= layers

    def of_range(self, first: int, count: int, layers: int) -> int:
        """Return how many of ``count`` layers from ``first`` on are in 8 bits."""
        return sum(self.has(layer, layers) for layer in range(first, first + count))


@refuses
def _gathered(flags: Flags) -> Iterator[str]:
    """Refuse to gather weights whose columns in 8 bits do not follow from their rows."""
    own = flags[EightBitSettings]
    if own.fp8_format is None or not own.fp8_param_gather or own.fp8_recipe in GATHERED:
        return
    yield (
        f"{GATHER} with --fp8-recipe {own.fp8_recipe}: it rounds the columns of a weight to other "
        "bits than its rows, from 16 bits: use --fp8-recipe blockwise, tensorwise or delayed, or "
        f"leave {GATHER} out"
    )
