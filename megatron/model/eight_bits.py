"""The linear layers of a rank that multiply in 8 bits, and what of them lasts beyond an iteration.

As in Transformer Engine these are the projections of attention and of the MLP, and with multi-token
prediction the one that joins. Attention itself, norms, embedding and output layer stay as they are.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor, nn

from megatron.kernels.cuda.transformer_engine import load_transformer_engine
from megatron.kernels.face import Kernels
from megatron.layers.eight_bits import EightBitProducts, Format, WideWeightGradients, types_of
from megatron.layers.engine_products import EngineProducts
from megatron.layers.linear import Linear
from megatron.layers.products import PlainProducts
from megatron.layers.scales import DelayedScales, OwnScales

Recipe = Literal["tensorwise", "delayed", "blockwise", "mxfp8"]
"""Where scales come from; those of blocks need Transformer Engine."""

_LOG = logging.getLogger(__name__)

NORM_READERS: Final = frozenset({"linear_qkv", "linear_fc1"})
"""Linear layers whose input is a norm, by their names in Megatron's checkpoints."""


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


class EightBitLayers:
    """All such layers of a rank; every rank calls ``end`` alike.

    Args:
        config: what is in 8 bits.
        layers: the linear layers by their names in the whole model; they are given their products.
        kernels: of the layers.
        device: of the layers.
        dtype: of activations.
        norms_again: inputs that are norms are not kept, but made again.

    Attributes:
        delayed: the scales, if they come from earlier iterations.
    """

    def __init__(
        self,
        config: EightBitConfig,
        layers: Iterable[tuple[str, Linear]],
        kernels: Kernels,
        device: torch.device,
        dtype: torch.dtype,
        *,
        norms_again: bool = False,
    ) -> None:
        named = dict(layers)
        self.delayed: DelayedScales | None = None
        if config.recipe == "delayed":
            self.delayed = DelayedScales(
                tuple(named),
                types_of(config.form),
                kernels,
                device,
                length=config.history,
                takes_largest=config.takes_largest,
                margin=config.margin,
            )
        engine = load_transformer_engine() if config.transformer_engine else None
        if engine is not None:
            _LOG.info("%s in 8 bits: Transformer Engine %s", config.recipe, engine.version)
        self._products: list[EightBitProducts | EngineProducts] = []
        for number, (name, layer) in enumerate(named.items()):
            delayed = self.delayed.of_layer(number) if self.delayed else None
            again = norms_again and name.rpartition(".")[2] in NORM_READERS
            narrow: EightBitProducts | EngineProducts
            if engine is None:
                scales = delayed or OwnScales(kernels)
                narrow = EightBitProducts(kernels, dtype, config.form, scales, keeps_input=again)
            else:
                narrow = EngineProducts(
                    engine, dtype, config.form, config.recipe, device, delayed, keeps_input=again
                )
            self._products.append(narrow)
            layer.products = narrow
            if config.wide_weight_gradients:
                layer.products = WideWeightGradients(narrow, PlainProducts(kernels))

    def begin(self, *, training: bool) -> None:
        """Begin an iteration, maybe with other weights, maybe in place of one that was given up."""
        for products in self._products:
            products.begin()
        if self.delayed is not None:
            self.delayed.begin(records=training)

    def end(self, agree: Callable[[Tensor], None]) -> None:
        """End an iteration of training; see ``DelayedScales.end``."""
        if self.delayed is not None:
            self.delayed.end(agree)


def linear_layers(module: nn.Module, prefix: str) -> Iterator[tuple[str, Linear]]:
    """Yield the linear layers in a module by their names in the whole model."""
    for name, part in module.named_modules(prefix=prefix.rstrip(".")):
        if isinstance(part, Linear):
            yield name, part
