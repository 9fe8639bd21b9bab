"""Which products of a model's linear layers are in 8 bits, as frozen data, and facts of recipes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch

from megatron.kernels.eight_bits import BLOCK, E4M3, E5M2
from megatron.layers.scales import GRADIENT, INPUT, WEIGHT, Role

Format = Literal["e4m3", "hybrid"]
"""The 8-bit types: ``e4m3`` for all factors, or ``hybrid`` with e5m2 for gradients."""

Recipe = Literal["tensorwise", "delayed", "blockwise", "mxfp8"]
"""The source of scales; ``mxfp8`` needs Transformer Engine."""

BLOCKS: Final[Mapping[str, int]] = {"blockwise": BLOCK, "mxfp8": 32}
"""For each recipe with scales of blocks, how many numbers of a row or a column share a scale."""

GATHERED: Final[frozenset[Recipe]] = frozenset({"tensorwise", "delayed", "blockwise"})
"""Recipes whose weights replicas can gather in 8 bits. Columns of mxfp8 are not those of its
rows."""


def types_of(form: Format) -> dict[Role, torch.dtype]:
    """Return the 8-bit type of each factor."""
    return {INPUT: E4M3, WEIGHT: E4M3, GRADIENT: E5M2 if form == "hybrid" else E4M3}


@dataclass(frozen=True)
class EightBitConfig:
    """Which products are in 8 bits, and how their factors are scaled.

    Attributes:
        form: 8-bit types of the factors.
        recipe: ``tensorwise``: scales from the tensors themselves; ``blockwise`` or ``mxfp8``: from
            blocks of the tensors; ``delayed``: from earlier iterations.
        margin: exponent of a power of two by which scales are divided (delayed scaling).
        history: number of iterations that delayed scaling remembers.
        takes_largest: delayed scaling uses the largest magnitude of the remembered iterations, not
            the magnitude of the last one.
        wide_weight_gradients: the products of weight gradients use the activations' dtype.
        wide_first: number of layers at the model's start that use the activations' dtype.
        wide_last: number of layers at the model's end that use the activations' dtype.
        transformer_engine: Transformer Engine forms the products; otherwise the kernels do.
    """

    form: Format = "hybrid"
    recipe: Recipe = "delayed"
    margin: int = 0
    history: int = 1
    takes_largest: bool = False
    wide_weight_gradients: bool = False
    wide_first: int = 0
    wide_last: int = 0
    transformer_engine: bool = False

    def has(self, layer: int, layers: int) -> bool:
        """Return whether the layer with index ``layer`` is in 8 bits; layers after the end are."""
        return self.wide_first <= layer < layers - self.wide_last or layer >= layers

    def of_range(self, first: int, count: int, layers: int) -> int:
        """Return how many of ``count`` layers from ``first`` on are in 8 bits."""
        return sum(self.has(layer, layers) for layer in range(first, first + count))
