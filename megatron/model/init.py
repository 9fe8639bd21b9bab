"""Initial values of parameters, which do not depend on the layout of ranks.

Every tensor of the model is drawn in fp32 from generators of its own, seeded by the run's seed and
by the tensor's name in the whole model. A rank takes the boxes that it owns. So the numbers are the
same on one rank or many, in bf16 or fp32, whole or in shards.

A CPU and a GPU draw different numbers from the same seed. PyTorch's generator on a GPU spreads the
numbers over as many threads as the GPU can run, so two kinds of GPU may also draw different
numbers.
"""

import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import nn

from megatron.layers.seeds import stable_seed
from megatron.model.ownership import (
    OUTPUT_LAYER,
    POSITION_EMBEDDINGS,
    WORD_EMBEDDINGS,
    OwnedParameter,
    layer_prefix,
    owned_by,
)
from megatron.model.settings import ModelSettings
from megatron.parallel.box import Box, Shape
from megatron.parallel.tensor import ALONE, TensorParallel

BLOCK_ROWS = 1024
"""Rows that share a generator, in matrices that are drawn in blocks."""

DRAWING: Final = ("cuda",)
"""Device types that draw their own parameters; for all others the CPU draws."""

_RESIDUAL_OUTPUTS: Final = ("self_attention.linear_proj.weight", "linear_fc2.weight")
_OF_EXPERTS: Final = ".mlp.experts."
_DRAWN_VECTORS: Final = ("self_attention.softmax_offset", "mlp.router.bias")
"""Vectors that begin like matrices, as in Megatron."""


@torch.no_grad()
def initialise(
    owned: OwnedParameter, config: ModelSettings, seed: int, *, on_cpu: bool = False
) -> None:
    """Set the initial values of a parameter.

    Matrices are drawn from normal(0, ``init_method_std``), those of embeddings and of the output
    layer with deviations of their own, if given. Matrices that write to the residual stream are
    divided by ``sqrt(2 num_layers)``, as in Megatron and GPT-2. Attention sinks and the biases of
    routers are drawn like matrices. Biases are 0, and norms multiply by 1.

    Args:
        owned: the parameter, of any dtype and on any device.
        config: the model.
        seed: the run's seed.
        on_cpu: whether the CPU also draws parameters that are on GPUs.
    """
    parameter, name, shape = owned.parameter, owned.name, owned.global_shape
    parameter.zero_()  # for the padding
    parts = [(box, part) for box, part in owned.parts(parameter) if box.size]
    if len(shape) == 1 and not name.endswith(_DRAWN_VECTORS):
        starts_at_one = name.endswith("norm.weight") and not config.norm.apply_layernorm_1p
        for _, part in parts:
            part.fill_(float(starts_at_one))
        return
    std, by_itself = _std(name, config), not on_cpu and parameter.device.type in DRAWING
    device = parameter.device if by_itself else torch.device("cpu")
    in_blocks = by_itself or name in (WORD_EMBEDDINGS, OUTPUT_LAYER) or _OF_EXPERTS in name
    for drawn, *seeds in _blocks(name, shape) if in_blocks else [(Box.whole(shape), name)]:
        here = [(drawn & box, box, part) for box, part in parts if (drawn & box).size]
        if not here:
            continue
        values = _normal(drawn.shape, std, stable_seed(seed, *seeds), device)
        for common, box, part in here:
            part[common.within(box).slices].copy_(values[common.within(drawn).slices])
        del values  # frees the memory before the next block is drawn


def init_layer(
    layer: nn.Module,
    layer_number: int,
    config: ModelSettings,
    seed: int,
    tensor: TensorParallel = ALONE,
) -> None:
    """Draw all parameters of a transformer layer.

    Args:
        layer: a ``TransformerLayer``.
        layer_number: the layer's index in the whole model, from 0.
        config: the model.
        seed: the run's seed.
        tensor: the tensor-parallel ranks that share the layer.
    """
    for owned in owned_by(layer, layer_prefix(layer_number), tensor):
        initialise(owned, config, seed)


def _std(name: str, config: ModelSettings) -> float:
    """Return the standard deviation of a matrix."""
    own = None
    if name.startswith((WORD_EMBEDDINGS, POSITION_EMBEDDINGS)):
        own = config.embedding_init_method_std
    elif name == OUTPUT_LAYER:
        own = config.output_layer_init_method_std
    if own is not None:
        return own
    outputs = math.sqrt(2 * config.num_layers) if name.endswith(_RESIDUAL_OUTPUTS) else 1.0
    return config.init_method_std / outputs


def _blocks(name: str, shape: Shape) -> Iterator[tuple[Box, str, int]]:
    """Yield blocks of rows with their seeds; the last block may reach beyond the tensor."""
    for block in range(math.ceil(shape[0] / BLOCK_ROWS)):
        start = (block * BLOCK_ROWS, *[0] * len(shape[1:]))
        yield Box(start, (BLOCK_ROWS, *shape[1:])), name, block


def _normal(shape: Shape, std: float, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    empty = torch.empty(shape, dtype=torch.float32, device=device)
    return empty.normal_(0.0, std, generator=generator)
