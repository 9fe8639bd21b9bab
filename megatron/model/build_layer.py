"""Chooses the class of a transformer layer by the order of attention and MLP."""

from collections.abc import Mapping
from typing import Final

from megatron.layers.site import Site
from megatron.model.layer_spec import Order, layer_spec
from megatron.model.parallel_layer import ParallelLayer
from megatron.model.settings import ModelSettings
from megatron.model.transformer_layer import TransformerLayer

LAYERS: Final[Mapping[Order, type[TransformerLayer]]] = {
    "sequential": TransformerLayer,
    "parallel": ParallelLayer,
}


def build_layer(config: ModelSettings, layer_number: int, site: Site) -> TransformerLayer:
    """Return a layer of a model; see ``TransformerLayer`` for the arguments."""
    return LAYERS[layer_spec(config, layer_number).order](config, layer_number, site)
