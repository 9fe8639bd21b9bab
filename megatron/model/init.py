"""Initial values that depend on a parameter's name only.

Every parameter is drawn in fp32 on the CPU from a generator of its own, seeded by the run's seed
and by the parameter's name in the whole model. The numbers are the same on one rank or many, in
bf16 or fp32, on a CPU or GPU, and with the vocabulary in one piece or in shards.
"""

import math

import torch
from torch import nn

from megatron.layers.seeds import stable_seed
from megatron.model.config import ModelConfig

VOCABULARY_BLOCK = 1024
"""Rows of a vocabulary matrix that share a generator, so that a shard draws only its own rows."""

_RESIDUAL_OUTPUTS = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")


def layer_prefix(layer_number: int) -> str:
    """Return the prefix of a layer's parameter names in the whole model; layers count from 0."""
    return f"decoder.layers.{layer_number}."


def init_parameter(parameter: torch.Tensor, name: str, seed: int, std: float) -> None:
    """Draw a parameter from normal(0, ``std``).

    Args:
        parameter: any shape, type and device.
        name: its name in the whole model.
        seed: the run's seed.
        std: standard deviation.
    """
    parameter.detach().copy_(_normal(parameter.shape, std, stable_seed(seed, name)))


def init_vocabulary_rows(
    weight: torch.Tensor, name: str, seed: int, std: float, first_row: int, real_rows: int
) -> None:
    """Draw a shard of a vocabulary matrix as it would be drawn within the whole matrix.

    Args:
        weight: the shard [rows, h].
        name: name of the whole matrix.
        seed: the run's seed.
        std: standard deviation of normal(0, std).
        first_row: first row of the shard within the whole matrix.
        real_rows: vocabulary size; rows from here on are padding and become 0.
    """
    rows, hidden_size = weight.shape
    last_row = max(min(first_row + rows, real_rows), first_row)
    weight.detach()[last_row - first_row :].zero_()
    for block in range(first_row // VOCABULARY_BLOCK, math.ceil(last_row / VOCABULARY_BLOCK)):
        block_row = block * VOCABULARY_BLOCK
        begin, end = max(first_row, block_row), min(last_row, block_row + VOCABULARY_BLOCK)
        values = _normal((VOCABULARY_BLOCK, hidden_size), std, stable_seed(seed, name, block))
        weight.detach()[begin - first_row : end - first_row] = values[
            begin - block_row : end - block_row
        ].to(weight.device)


def init_layer(layer: nn.Module, layer_number: int, config: ModelConfig, seed: int) -> None:
    """Draw all parameters of a transformer layer.

    Weights are normal(0, ``init_method_std``). Weights that write to the residual stream are
    divided by ``sqrt(2 num_layers)``, as in Megatron and GPT-2. Biases are 0, norms 1.

    Args:
        layer: a ``TransformerLayer``.
        layer_number: its index in the whole model, from 0.
        config: the model.
        seed: the run's seed.
    """
    residual_std = config.init_method_std / math.sqrt(2 * config.num_layers)
    for name, parameter in layer.named_parameters():
        if parameter.dim() == 1:
            nn.init.constant_(parameter, 1.0 if name.endswith("layernorm.weight") else 0.0)
        else:
            std = residual_std if name in _RESIDUAL_OUTPUTS else config.init_method_std
            init_parameter(parameter, layer_prefix(layer_number) + name, seed, std)


def _normal(shape: tuple[int, ...], std: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
