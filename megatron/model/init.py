"""Initial values that depend on a parameter's name only, and on what draws them.

Every tensor of the model is drawn in fp32 from generators of its own, seeded by the run's seed and
by its name in the whole model. A rank takes the boxes that it owns. So the numbers are the same on
one rank or many, in bf16 or fp32, whole or in shards.

A CPU and a GPU draw other numbers by the same seed. PyTorch's generator of a GPU spreads them over
as many threads as the GPU can run, so GPUs of other kinds may draw others, too.
"""

import math
from collections.abc import Iterator
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

BLOCK_ROWS = 1024
"""Rows of a matrix that share a generator, where it is drawn in blocks."""

DRAWING: Final = ("cuda",)
"""Types of devices that draw; for all others the CPU does."""

_RESIDUAL_OUTPUTS: Final = ("self_attention.linear_proj.weight", "linear_fc2.weight")
_OF_EXPERTS: Final = ".mlp.experts."


@torch.no_grad()
def initialise(
    owned: OwnedParameter, config: ModelConfig, seed: int, *, on_cpu: bool = False
) -> None:
    """Draw a parameter.

    Matrices are normal(0, ``init_method_std``). Matrices that write to the residual stream are
    divided by ``sqrt(2 num_layers)``, as in Megatron and GPT-2. Biases are 0, norms
    multiply by 1.

    Args:
        owned: any type and device.
        config: the model.
        seed: the run's seed.
        on_cpu: whether parameters on GPUs are drawn on the CPU, too, as all others are.
    """
    parameter, name, shape = owned.parameter, owned.name, owned.global_shape
    parameter.zero_()  # for the padding
    parts = [(box, part) for box, part in owned.parts(parameter) if box.size]
    if len(shape) == 1:
        starts_at_one = name.endswith("norm.weight") and not config.apply_layernorm_1p
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
        del values  # before the next ones are there


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


def _std(name: str, config: ModelConfig) -> float:
    """Return the standard deviation of a matrix."""
    outputs = math.sqrt(2 * config.num_layers) if name.endswith(_RESIDUAL_OUTPUTS) else 1.0
    return config.init_method_std / outputs


def _blocks(name: str, shape: Shape) -> Iterator[tuple[Box, str, int]]:
    """Yield blocks of rows, each with what seeds it; the last one may reach beyond the tensor."""
    for block in range(math.ceil(shape[0] / BLOCK_ROWS)):
        start = (block * BLOCK_ROWS, *[0] * len(shape[1:]))
        yield Box(start, (BLOCK_ROWS, *shape[1:])), name, block


def _normal(shape: Shape, std: float, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    empty = torch.empty(shape, dtype=torch.float32, device=device)
    return empty.normal_(0.0, std, generator=generator)
