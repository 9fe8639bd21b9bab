"""The linear layers of a rank that multiply in 8 bits, and their scales from past iterations.

As in Transformer Engine these layers are the projections of attention and of the MLP, and the
projection in multi-token prediction. Attention itself, norms, embedding and output layer keep the
dtype of the activations.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from torch import Tensor, nn

from megatron.kernels.cuda.transformer_engine import load_transformer_engine
from megatron.layers.eight_bit_config import EightBitConfig
from megatron.layers.eight_bits import EightBitProducts, WideWeightGradients, types_of
from megatron.layers.engine_products import EngineProducts
from megatron.layers.linear import Linear
from megatron.layers.products import PlainProducts
from megatron.layers.scales import DelayedScales, OwnScales
from megatron.layers.site import Site

_LOG = logging.getLogger(__name__)

NORM_READERS: Final = frozenset({"linear_qkv", "linear_fc1"})
"""Linear layers whose input is a norm, by their names in Megatron's checkpoints."""


class EightBitLayers:
    """All 8-bit layers of a rank; every rank calls ``end`` together.

    Args:
        config: which products are in 8 bits, and how.
        layers: the linear layers by their names in the whole model; their ``products`` are set.
        site: device, dtype, ranks and kernels of the layers.

    Attributes:
        delayed: the scales, if they come from earlier iterations.
    """

    def __init__(
        self,
        config: EightBitConfig,
        layers: Iterable[tuple[str, Linear]],
        site: Site,
    ) -> None:
        named = dict(layers)
        kernels, device, dtype = site.kernels, site.device, site.dtype
        norms_again = "layernorm" in site.recomputation.parts
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
            products: EightBitProducts | EngineProducts
            if engine is None:
                scales = delayed or OwnScales(kernels)
                products = EightBitProducts(kernels, dtype, config.form, scales, keeps_input=again)
            else:
                products = EngineProducts(
                    engine, dtype, config.form, config.recipe, device, delayed, keeps_input=again
                )
            self._products.append(products)
            layer.products = products
            if config.wide_weight_gradients:
                layer.products = WideWeightGradients(products, PlainProducts(kernels))

    def begin(self, *, training: bool) -> None:
        """Begin an iteration; weights may have changed, and the last iteration may be abandoned."""
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
