"""The classes of transformer layers, by the order of their parts."""

from collections.abc import Mapping
from typing import Final

import torch

from megatron.kernels.face import Kernels
from megatron.model.config import ModelConfig
from megatron.model.layer_spec import Order, layer_spec
from megatron.model.parallel_layer import ParallelLayer
from megatron.model.transformer_layer import TransformerLayer
from megatron.parallel.context import WHOLE_SEQUENCES, ContextParallel
from megatron.parallel.tensor import ALONE, TensorParallel

LAYERS: Final[Mapping[Order, type[TransformerLayer]]] = {
    "sequential": TransformerLayer,
    "parallel": ParallelLayer,
}


def build_layer(
    config: ModelConfig,
    layer_number: int,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Kernels,
    tensor: TensorParallel = ALONE,
    stream_kernels: Kernels | None = None,
    context: ContextParallel = WHOLE_SEQUENCES,
) -> TransformerLayer:
    """Return a layer of a model; see ``TransformerLayer`` for the arguments."""
    order = layer_spec(config, layer_number).order
    make = LAYERS[order]
    return make(config, layer_number, device, dtype, kernels, tensor, stream_kernels, context)
