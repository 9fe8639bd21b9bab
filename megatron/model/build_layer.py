"""Chooses the class of a transformer layer by the order of attention and MLP."""

from megatron.layers.site import Site
from megatron.model.parallel_layer import ParallelLayer
from megatron.model.settings import ModelSettings
from megatron.model.transformer_layer import TransformerLayer


def build_layer(config: ModelSettings, layer_number: int, site: Site) -> TransformerLayer:
    """Return a layer of a model; see ``TransformerLayer`` for the arguments."""
    own_class = ParallelLayer if config.block.parallel_attn else TransformerLayer
    return own_class(config, layer_number, site)
