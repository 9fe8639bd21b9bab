"""Bytes that the optimizer keeps and moves per element of a parameter, counted on one matrix."""

from dataclasses import replace
from functools import lru_cache
from typing import Final, NamedTuple

import torch
from torch import nn

from megatron.kernels.counted import counted_kernels
from megatron.kernels.cuda.update_operators import BLOCK, SQUARES_BLOCK
from megatron.kernels.eight_bits import E4M3
from megatron.layers.eight_bit_settings import BLOCKS
from megatron.layers.gathered_weight import GatheredWeight
from megatron.model.ownership import LAYERS, WORD_EMBEDDINGS, OwnedParameter
from megatron.optimizer.bucket import Bucket
from megatron.optimizer.grad_norm import local_sum_of_squares
from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.make import make_optimizer
from megatron.optimizer.muon import QKVRows
from megatron.optimizer.parameters import ParameterPart
from megatron.optimizer.settings import OptimizerSettings
from megatron.parallel.groups import ConnectedAxis
from megatron.planning.count.apart import apart
from megatron.planning.count.recorder import META, Recorder
from megatron.run.run_config import RunConfig
from megatron.simulator.costs.count import Work, in_order

TABLE_BYTES: Final = 4 / BLOCK + 4 / SQUARES_BLOCK
"""Bytes for an element that a rank updates, of the tables by which the step and the norm of the
gradients find their tensors (``kernels/cuda/update_operators.py``). The count does not see them,
because operators make them on their first use."""

_WIDTH: Final = 2048
_NOBODY: Final = ConnectedAxis("tensor", 0, (0,))


class StepCount(NamedTuple):
    """The optimizer's state and work for one element of a parameter.

    Attributes:
        state: bytes of master weight and moments.
        gradient: bytes of the main gradient.
        moved: bytes that a step reads and writes.
        normed: bytes that the norm of the gradients reads and writes.
        flops: FLOPs of a step's products.
    """

    state: float
    gradient: float
    moved: float
    normed: float
    flops: float


def count_step(config: RunConfig, *, matrix: bool) -> StepCount:
    """Return the state and the work of a step for one element of a parameter.

    Some optimizers (Muon) update a ``matrix`` of a layer by another rule than other parameters.
    """
    optimizer = config.optimizer
    if optimizer.implementation == "apex":  # a count needs no apex
        optimizer = replace(optimizer, implementation="local")
    return _count(optimizer, config.train.dtype, config.train.gradient_dtype, matrix)


def count_step_on_host(config: RunConfig) -> StepCount:
    """Return the state and the work of a step by PyTorch, as on the host, for one element."""
    optimizer = replace(config.optimizer, implementation="torch")
    return _count(optimizer, config.train.dtype, config.train.gradient_dtype, matrix=False)


@lru_cache(64)
def _count(
    config: OptimizerSettings, dtype: torch.dtype, gradient_dtype: torch.dtype, matrix: bool
) -> StepCount:
    return apart(lambda: _counted_apart(config, dtype, gradient_dtype, matrix))


def _counted_apart(
    config: OptimizerSettings, dtype: torch.dtype, gradient_dtype: torch.dtype, matrix: bool
) -> StepCount:
    kernels, recorder = counted_kernels(dtype), Recorder()
    name = f"{LAYERS}0.mlp.linear_fc1.weight" if matrix else WORD_EMBEDDINGS
    weight = nn.Parameter(torch.empty(_WIDTH, _WIDTH, dtype=dtype, device=META))
    entry = OwnedParameter.whole(name, weight)
    with recorder:
        Bucket([entry], kernels, gradient_dtype=gradient_dtype)
        gradient = recorder.held
        parts = [ParameterPart.whole(entry)]
        optimizer = make_optimizer(config, QKVRows(1, 1, 1), _NOBODY, kernels, parts)
        rates = Rates(1e-4, 1e-4, 0.1)
        optimizer.step(rates, grad_norm=3.0)  # the first step allocates the moments
        state = recorder.held - gradient
        with recorder.recording() as of_norm:
            local_sum_of_squares(parts, kernels, META)
        with recorder.recording() as of_step:
            optimizer.step(rates, grad_norm=3.0)
    norm, step, elements = in_order(*of_norm), in_order(*of_step), weight.numel()
    sums = (state, gradient, _bytes(step), _bytes(norm), step.flops)
    return StepCount(*(own / elements for own in sums))


def count_rounding(config: RunConfig) -> float:
    """Return the bytes that rounding to 8 bits moves for one element of a gathered weight."""
    eight_bits = config.train.eight_bits
    assert eight_bits is not None, "the run multiplies in 8 bits"
    return _count_rounding(eight_bits.fp8_recipe in BLOCKS, config.train.dtype)


@lru_cache(8)
def _count_rounding(in_squares: bool, dtype: torch.dtype) -> float:
    return apart(lambda: _rounded_apart(in_squares, dtype))


def _rounded_apart(in_squares: bool, dtype: torch.dtype) -> float:
    recorder = Recorder()
    weight = GatheredWeight(1, _WIDTH, _WIDTH, in_squares, E4M3, lambda bits, worths: None)
    rows_rk = torch.empty(_WIDTH, _WIDTH, dtype=dtype, device=META)
    bits_rk, largest_gbc = weight.without_values(META)
    with recorder, recorder.recording() as parts:
        weight.raise_to_largest(largest_gbc, rows_rk, 0)
        weight.round_rows(bits_rk, rows_rk, 0, weight.scales(largest_gbc)[0])
    return _bytes(in_order(*parts)) / rows_rk.numel()


def _bytes(work: Work) -> int:
    return sum(launch.bytes for launch in work.launches)
