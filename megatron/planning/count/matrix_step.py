"""The work of a step that updates whole matrices (Muon), by the shape of the matrix.

The products of Newton-Schulz have FLOPs that depend on both sides of a matrix, on the way in which
tensor-parallel ranks share it, and on the matrices that it counts as (queries, keys and values, or
the experts of a layer). So the optimizer's own step runs once without values for every kind of
matrix, and a recorder lists its kernels and collectives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from megatron.kernels.counted import counted_kernels
from megatron.model.ownership import LAYERS, OwnedParameter
from megatron.optimizer.bucket import Bucket
from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.make import make_optimizer
from megatron.optimizer.muon import QKVRows, qkv_rows
from megatron.optimizer.parameters import ParameterPart
from megatron.optimizer.settings import OptimizerSettings
from megatron.parallel.box import Piece, shard, whole
from megatron.parallel.groups import ConnectedAxis
from megatron.planning.count.apart import apart
from megatron.planning.count.recorder import META, ListedGroup, Recorder
from megatron.run.run_config import RunConfig
from megatron.simulator.costs.count import Matrix, Work, in_order

_CACHED: Final = 512
"""Kinds of matrices whose steps are kept: a model has about ten, and a search asks for layouts."""


class _Asked(NamedTuple):
    """A matrix whose step is wanted, with all settings on which its work depends."""

    optimizer: OptimizerSettings
    qkv: QKVRows
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    sharers: int
    matrix: Matrix


def count_matrix_step(config: RunConfig, matrix: Matrix) -> Work:
    """Return the work of the optimizer's step for one matrix that a rank updates.

    With the collectives of the tensor-parallel ranks that share the matrix, if the step has them.
    """
    optimizer = config.optimizer
    if optimizer.implementation == "apex":  # a count needs no apex
        optimizer = replace(optimizer, implementation="local")
    train = config.train
    kind = optimizer, qkv_rows(config.model), train.dtype, train.gradient_dtype
    return _count(_Asked(*kind, config.parallel.tensor.size, matrix))


@lru_cache(_CACHED)
def _count(asked: _Asked) -> Work:
    return apart(lambda: _counted_apart(asked))


def _counted_apart(asked: _Asked) -> Work:
    matrix, recorder = asked.matrix, Recorder()
    kernels = counted_kernels(asked.dtype)
    weight = nn.Parameter(torch.empty(matrix.own, dtype=asked.dtype, device=META))
    name = f"{LAYERS}0.{matrix.name}"
    by_rank = [_pieces(matrix, rank, asked.sharers) for rank in range(asked.sharers)]
    entry = OwnedParameter(name, weight, matrix.whole, by_rank[0], matrices=matrix.stacked)
    group = ListedGroup(recorder, "tensor", 0, asked.sharers)
    ranks = tuple(range(asked.sharers))
    axis = _Sharers("tensor", 0, ranks, group, by_rank={name: by_rank})
    with recorder:
        Bucket([entry], kernels, gradient_dtype=asked.gradient_dtype)
        parts = [ParameterPart.whole(entry)]
        optimizer = make_optimizer(asked.optimizer, asked.qkv, axis, kernels, parts)
        with recorder.recording() as of_step:
            optimizer.step(Rates(1e-4, 1e-4, 0.1), grad_norm=3.0)
    return in_order(*of_step)


def _pieces(matrix: Matrix, rank: int, sharers: int) -> tuple[Piece, ...]:
    """Return the boxes of a tensor-parallel rank."""
    sides = enumerate(zip(matrix.own, matrix.whole, strict=True))
    cut = [dimension for dimension, (own, all_of_it) in sides if own != all_of_it]
    if not cut:
        return whole(matrix.own)
    return shard(matrix.whole, cut[0], rank, sharers, matrix.pieces)


@dataclass(frozen=True)
class _Sharers(ConnectedAxis):
    """The tensor-parallel ranks of a step that is counted.

    Attributes:
        by_rank: the boxes of every rank, by the name of the matrix.
    """

    by_rank: Mapping[str, Sequence[tuple[Piece, ...]]] = field(default_factory=dict)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return what every rank would give: the boxes of the matrices that ``value`` names."""
        return [{name: self.by_rank[name][rank] for name in value} for rank in self.ranks]
