"""Which products of a model's linear layers are in 8 bits, as frozen data."""

from dataclasses import dataclass
from typing import Literal

from megatron.layers.eight_bits import Format

Recipe = Literal["tensorwise", "delayed", "blockwise", "mxfp8"]
"""Where scales come from; those of blocks need Transformer Engine."""


@dataclass(frozen=True)
class EightBitConfig:
    """Which products are in 8 bits, and how their factors are scaled.

    Attributes:
        form: types of the factors.
        recipe: scales from the tensors themselves, of blocks of them, or from earlier iterations.
        margin: scales are smaller by this power of two.
        history: iterations that delayed scaling remembers.
        takes_largest: it takes the largest magnitude of them, not the last.
        wide_weight_gradients: the weights' gradients are formed in the activations' type.
        wide_first: layers at the model's start that stay in it.
        wide_last: layers at its end that do.
        transformer_engine: that package forms the products; otherwise the kernels do.
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
        """Return whether a layer of the model, by its index, is in 8 bits; those behind it are."""
        return self.wide_first <= layer < layers - self.wide_last or layer >= layers

    def of_range(self, first: int, count: int, layers: int) -> int:
        """Return how many of ``count`` layers from ``first`` on are in 8 bits."""
        return sum(self.has(layer, layers) for layer in range(first, first + count))
