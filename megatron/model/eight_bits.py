"""The linear layers of a rank that multiply in 8 bits, and their scales from past iterations.

As in Transformer Engine these layers are the projections of attention, of the MLP and of experts,
and the projection in multi-token prediction. Attention itself, norms, routers, embedding and output
layer keep the dtype of the activations.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeAlias

from torch import Tensor, nn

from megatron.kernels.cuda.transformer_engine import load_transformer_engine
from megatron.layers.block_multiplier import BlockMultiplier, GroupedBlockMultiplier
from megatron.layers.eight_bit_settings import (
    BLOCKS,
    GATHERED,
    WITHOUT_EXPERTS,
    EightBitSettings,
    types_of,
)
from megatron.layers.eight_bits import ByMultiplier, EightBitProducts, Multiplier
from megatron.layers.engine_multiplier import EngineMultiplier
from megatron.layers.experts.eight_bit_products import EightBitGroupedProducts, GroupedMultiplier
from megatron.layers.experts.grouped_linear import GroupedLinear
from megatron.layers.experts.grouped_products import PlainGroupedProducts
from megatron.layers.gathered_weight import GatheredWeight
from megatron.layers.kernel_multiplier import KernelMultiplier
from megatron.layers.linear import Linear
from megatron.layers.mx_multiplier import MicroscalingMultiplier
from megatron.layers.products import PlainProducts
from megatron.layers.scales import WEIGHT, DelayedScales, LayerScales, OwnScales
from megatron.layers.site import Site
from megatron.layers.wide_weight_gradients import WideWeightGradients

_LOG = logging.getLogger(__name__)

EightBitLayer: TypeAlias = Linear | GroupedLinear
"""A layer that can multiply in 8 bits."""

NORM_READERS: Final = frozenset(
    {"linear_qkv", "linear_fc1", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj"}
)
"""Linear layers whose input is a norm of the stream, by their names in Megatron's checkpoints."""


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
        config: EightBitSettings,
        layers: Iterable[tuple[str, EightBitLayer]],
        site: Site,
    ) -> None:
        named = dict(layers)
        self._config, self._site = config, site
        self.delayed: DelayedScales | None = None
        if config.fp8_recipe == "delayed":
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
                length=config.fp8_amax_history_len,
                takes_largest=config.fp8_amax_compute_algo == "max",
                margin=config.fp8_margin,
            )
        self._engine = load_transformer_engine() if config.transformer_engine else None
        if self._engine is not None:
            _LOG.info(
                "%s in 8 bits: Transformer Engine %s", config.fp8_recipe, self._engine.version
            )
        self._layers = named
        self._products = {name: self._in_eight_bits(name, layer) for name, layer in named.items()}

    def _in_eight_bits(self, name: str, layer: EightBitLayer) -> ByMultiplier[Any]:
        """Let a layer multiply in 8 bits, and return its strategy."""
        parts = self._site.recomputation.parts
        if isinstance(layer, GroupedLinear):
            forgets_active = "moe_act" in parts and "moe" not in parts
            layer.products = grouped = EightBitGroupedProducts(
                self._grouped_multiplier(name, layer),
                keeps_input=layer.way == "joins" and forgets_active,
            )
            return grouped
        layer.products = own = EightBitProducts(
            self._multiplier(name), keeps_input=self._drops_input(name)
        )
        return own

    def _drops_input(self, name: str) -> bool:
        """Return whether recomputation drops the input of a linear layer, and makes it again.

        (With squared ReLU it stays, as the function keeps it; then nothing else need be kept.)
        """
        parts = self._site.recomputation.parts
        own = name.rpartition(".")[2]
        if own == "linear_fc2":
            return "mlp_act" in parts and "mlp" not in parts
        return "layernorm" in parts and own in NORM_READERS

    def _multiplier(self, name: str) -> Multiplier[Any]:
        """Return what multiplies in a linear layer."""
        config, site = self._config, self._site
        delayed = self._delayed_of(name)
        found: Multiplier[Any]
        if self._engine is not None:
            found = EngineMultiplier(
                self._engine, site.dtype, config.form, config.fp8_recipe, site.device, delayed
            )
        elif config.fp8_recipe == "mxfp8":
            found = MicroscalingMultiplier(site.kernels, site.dtype, config.form)
        elif config.fp8_recipe == "blockwise":
            found = BlockMultiplier(site.kernels, site.dtype, config.form)
        else:
            scaling = delayed or OwnScales(site.kernels)
            found = KernelMultiplier(site.kernels, site.dtype, config.form, scaling)
        if not config.wide_weight_gradients:
            return found
        return WideWeightGradients(found, PlainProducts(site.kernels))

    def _grouped_multiplier(self, name: str, layer: GroupedLinear) -> Multiplier[Any]:
        """Return what multiplies in a layer of experts."""
        config, site = self._config, self._site
        delayed = self._delayed_of(name)
        found: Multiplier[Any]
        assert config.fp8_recipe not in WITHOUT_EXPERTS, config.fp8_recipe
        if config.fp8_recipe == "blockwise":
            found = GroupedBlockMultiplier(site.kernels, site.dtype, config.form)
        else:
            scaling, matrices = delayed or OwnScales(site.kernels), layer.matrices(layer.weight)
            found = GroupedMultiplier(site.kernels, site.dtype, config.form, scaling, matrices)
        if not config.wide_weight_gradients:
            return found
        return WideWeightGradients(found, PlainGroupedProducts(site.kernels))

    def _delayed_of(self, name: str) -> LayerScales | None:
        """Return a layer's scales, if they come from earlier iterations."""
        if self.delayed is None:
            return None
        layer = self._layers[name]
        own = layer.own_experts if isinstance(layer, GroupedLinear) else None
        return self.delayed.of_layer(name, own)

    def gathered_weights(self) -> dict[int, GatheredWeight]:
        """Return the weights of these layers, by the ``id`` of their parameters.

        The recipe must be one of ``GATHERED``, and the kernels must form the products.
        """
        assert self._config.fp8_recipe in GATHERED, "columns are not those of rows"
        assert self._engine is None, "Transformer Engine has its own tensors of 8 bits"
        in_squares, dtype = self._config.fp8_recipe in BLOCKS, types_of(self._config.form)[WEIGHT]
        found = {}
        for name, layer in self._layers.items():
            matrices = layer.experts if isinstance(layer, GroupedLinear) else 1
            rows, columns = layer.weight.shape
            found[id(layer.weight)] = GatheredWeight(
                matrices,
                rows // matrices,
                columns,
                in_squares,
                dtype,
                self._products[name].give,
                self._delayed_of(name),
            )
        return found

    @property
    def repeats(self) -> bool:
        """Whether all later passes launch what a pass launches now: scales have their last form."""
        return self.delayed is None or self.delayed.has_history

    def renew(self, part: nn.Module) -> None:
        """Quantise the weights in a part of the model, each into its memory (``renew``)."""
        for layer in part.modules():
            if isinstance(layer, Linear) and isinstance(layer.products, ByMultiplier):
                layer.products.renew(layer.weight)

    def begin(self, *, training: bool) -> None:
        """Begin an iteration; weights may have changed, and the last iteration may be abandoned."""
        for products in self._products.values():
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
