"""The linear layers of a rank that multiply in 8 bits, and their scales from past iterations.

As in Transformer Engine these layers are the projections of attention, of the MLP and of experts,
and the projection in multi-token prediction. Attention itself, norms, routers, embedding and output
layer keep the dtype of the activations.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeAlias

from torch import Tensor, nn

from megatron.kernels.cuda.transformer_engine import load_transformer_engine
from megatron.layers.eight_bit_config import EightBitConfig
from megatron.layers.eight_bits import EightBitProducts, WideWeightGradients, types_of
from megatron.layers.engine_products import EngineProducts
from megatron.layers.experts.eight_bit_products import (
    EightBitGroupedProducts,
    WideGroupedWeightGradients,
)
from megatron.layers.experts.grouped_linear import GroupedLinear
from megatron.layers.experts.grouped_products import PlainGroupedProducts
from megatron.layers.linear import Linear
from megatron.layers.products import PlainProducts
from megatron.layers.scales import DelayedScales, ExpertScaling, OwnExpertScales, OwnScales
from megatron.layers.site import Site

_LOG = logging.getLogger(__name__)

EightBitLayer: TypeAlias = Linear | GroupedLinear
"""A layer that can multiply in 8 bits."""

_InEightBits: TypeAlias = EightBitProducts | EngineProducts | EightBitGroupedProducts

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
        layers: Iterable[tuple[str, EightBitLayer]],
        site: Site,
    ) -> None:
        named = dict(layers)
        self._config, self._site = config, site
        self.delayed: DelayedScales | None = None
        if config.recipe == "delayed":
            self.delayed = DelayedScales(
                tuple(named),
                types_of(config.form),
                site.kernels,
                site.device,
                experts={
                    name: layer.all_experts
                    for name, layer in named.items()
                    if isinstance(layer, GroupedLinear)
                },
                length=config.history,
                takes_largest=config.takes_largest,
                margin=config.margin,
            )
        self._engine = load_transformer_engine() if config.transformer_engine else None
        if self._engine is not None:
            _LOG.info("%s in 8 bits: Transformer Engine %s", config.recipe, self._engine.version)
        self._products: list[_InEightBits] = [
            self._of_experts(name, layer)
            if isinstance(layer, GroupedLinear)
            else self._of_linear(name, layer)
            for name, layer in named.items()
        ]

    def _of_linear(self, name: str, layer: Linear) -> EightBitProducts | EngineProducts:
        """Let a linear layer multiply in 8 bits, and return its strategy."""
        config, site, engine = self._config, self._site, self._engine
        delayed = self.delayed.of_layer(name) if self.delayed else None
        norms_again = "layernorm" in site.recomputation.parts
        again = norms_again and name.rpartition(".")[2] in NORM_READERS
        products: EightBitProducts | EngineProducts
        if engine is None:
            scales = delayed or OwnScales(site.kernels)
            products = EightBitProducts(
                site.kernels, site.dtype, config.form, scales, keeps_input=again
            )
        else:
            form, recipe = config.form, config.recipe
            products = EngineProducts(
                engine, site.dtype, form, recipe, site.device, delayed, keeps_input=again
            )
        layer.products = products
        if config.wide_weight_gradients:
            layer.products = WideWeightGradients(products, PlainProducts(site.kernels))
        return products

    def _of_experts(self, name: str, layer: GroupedLinear) -> EightBitGroupedProducts:
        """Let a layer of experts multiply in 8 bits, and return its strategy."""
        config, site = self._config, self._site
        scales: ExpertScaling = OwnExpertScales(site.kernels)
        if self.delayed is not None:
            scales = self.delayed.of_experts(name, layer.own_experts)
        matrices, parts = layer.matrices(layer.weight), site.recomputation.parts
        forgets_active = "moe_act" in parts and "moe" not in parts
        products = EightBitGroupedProducts(
            site.kernels,
            site.dtype,
            config.form,
            scales,
            len(matrices),
            matrices.shape[1],
            site.device,
            keeps_input=layer.way == "joins" and forgets_active,
        )
        layer.products = products
        if config.wide_weight_gradients:
            plain = PlainGroupedProducts(site.kernels)
            layer.products = WideGroupedWeightGradients(products, plain)
        return products

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


def linear_layers(module: nn.Module, prefix: str) -> Iterator[tuple[str, EightBitLayer]]:
    """Yield the linear layers in a module, also of experts, by their names in the whole model."""
    for name, part in module.named_modules(prefix=prefix.rstrip(".")):
        if isinstance(part, EightBitLayer):
            yield name, part
