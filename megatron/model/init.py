"""Initial values that depend on a parameter's name only.

Every tensor of the model is drawn in fp32 on the CPU from generators of its own, seeded by the
run's seed and by its name in the whole model. A rank takes the boxes that it owns. So the numbers
are the same on one rank or many, in bf16 or fp32, on a CPU or GPU, whole or in shards.
"""

import math
from typing import Final

import torch
from torch import nn

from megatron.layers.seeds import stable_seed
from megatron.model.config import ModelConfig
from megatron.model.ownership import (
    OUTPUT_LAYER,
    WORD_EMBEDDINGS,
    OwnedParameter,
    layer_prefix,
    owned_by,
)
from megatron.parallel.box import Box, Shape
from megatron.parallel.tensor import ALONE, TensorParallel

VOCABULARY_BLOCK = 1024
"""Rows of a vocabulary matrix that share a generator, so that a shard draws only its own rows."""

_RESIDUAL_OUTPUTS: Final = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")


@torch.no_grad()
def initialise(owned: OwnedParameter, config: ModelConfig, seed: int) -> None:
    """Draw a parameter.

    Matrices are normal(0, ``init_method_std``). Matrices that write to the residual stream are
    divided by ``sqrt(2 num_layers)``, as in Megatron and GPT-2. Biases are 0, norms
    multiply by 1.

    Args:
        owned: any type and device.
        config: the model.
        seed: the run's seed.
    """
    owned.parameter.zero_()  # for the padding
    for box, part in owned.parts(owned.parameter):
        if box.size:
            part.copy_(_values(owned.name, owned.global_shape, box, config, seed))


def init_layer(
    layer: nn.Module,
    layer_number: int,
    config: ModelConfig,
    seed: int,
    tensor: TensorParallel = ALONE,
) -> None:
    """Draw all parameters of a transformer layer.

    Args:
        layer: a ``TransformerLayer``.
        layer_number: its index in the whole model, from 0.
        config: the model.
        seed: the run's seed.
        tensor: the ranks that hold the layer together.
    """
    for owned in owned_by(layer, layer_prefix(layer_number), tensor):
        initialise(owned, config, seed)


def _values(name: str, shape: Shape, box: Box, config: ModelConfig, seed: int) -> torch.Tensor:
    """Return the initial values of a box of a tensor of the model, fp32."""
    if len(shape) == 1:
        starts_at_one = name.endswith("norm.weight") and not config.apply_layernorm_1p
        return torch.full(box.shape, float(starts_at_one))
    std = config.init_method_std
    if name.endswith(_RESIDUAL_OUTPUTS):
        std /= math.sqrt(2 * config.num_layers)
    if name not in (WORD_EMBEDDINGS, OUTPUT_LAYER):
        return _normal(shape, std, stable_seed(seed, name))[box.slices]
    values = torch.empty(box.shape)
    for block in range(box.start[0] // VOCABULARY_BLOCK, math.ceil(box.stop[0] / VOCABULARY_BLOCK)):
        drawn = Box((block * VOCABULARY_BLOCK, 0), (VOCABULARY_BLOCK, *shape[1:]))
        block_values = _normal(drawn.shape, std, stable_seed(seed, name, block))
        common = drawn & box
        values[common.within(box).slices] = block_values[common.within(drawn).slices]
    return values


def _normal(shape: Shape, std: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
