"""Slices of a matrix become slices of its update; compared with whole matrices in float64."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final
from unittest.mock import patch

import pytest
import torch
from harness.rank_pool import RankPool
from optimizer.entries import QKV
from reference.plain_optimizers import polar
from torch import Tensor, nn

from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.layers.main_grad import give_main_grad
from megatron.model.ownership import OwnedParameter
from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.make import make_optimizer
from megatron.optimizer.newton_schulz import coefficients
from megatron.optimizer.parameters import ParameterPart
from megatron.optimizer.settings import MuonSettings, OptimizerSettings, SharedMatrices
from megatron.optimizer.sliced_matrices import cut_dimension, orthogonalized_slice
from megatron.parallel import collectives
from megatron.parallel.box import Piece, shard
from megatron.parallel.grid import Grid
from megatron.parallel.groups import ConnectedAxis, make_groups

STEPS: Final = coefficients("quintic", 5)


@dataclass(frozen=True)
class Matrix:
    """A matrix of a layer.

    Attributes:
        shape: of the whole matrix.
        cut: the dimension that ranks cut; ``None``: each has all of it.
        fused: equal matrices, one below the other, each of which is cut by itself.
        experts: matrices of experts that lie one below the other, each of ``fused`` matrices.
    """

    shape: tuple[int, int]
    cut: int | None
    fused: int = 1
    experts: int = 1

    def pieces(self, rank: int, ranks: int) -> tuple[Piece, ...]:
        if self.cut is None:
            return shard(self.shape, 0, 0, 1)
        parts = self.fused * self.experts if self.cut == 0 else 1
        return shard(self.shape, self.cut, rank, ranks, parts)


LAYER: Final = "decoder.layers.1."
QKV_NAME: Final = f"{LAYER}self_attention.linear_qkv.weight"
MATRICES: Final[Mapping[str, Matrix]] = {
    QKV_NAME: Matrix((32, 12), 0),  # four groups; keys and values have 8 rows each
    f"{LAYER}self_attention.linear_proj.weight": Matrix((12, 16), 1),
    f"{LAYER}mlp.linear_fc1.weight": Matrix((48, 12), 0, fused=2),
    f"{LAYER}mlp.linear_fc2.weight": Matrix((12, 24), 1),
    f"{LAYER}mlp.flat.weight": Matrix((8, 13), 0, fused=2),
    f"{LAYER}mlp.narrow.weight": Matrix((13, 4), 1),
    f"{LAYER}mlp.router.weight": Matrix((6, 12), None),
    f"{LAYER}mlp.experts.linear_fc1.weight": Matrix((3 * 8, 14), 0, fused=2, experts=3),
    f"{LAYER}mlp.experts.linear_fc2.weight": Matrix((3 * 14, 4), 1, experts=3),
    f"{LAYER}mlp.experts.tall.weight": Matrix((3 * 16, 6), 0, experts=3),
}


def gradient_of(name: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + list(MATRICES).index(name))
    return torch.randn(MATRICES[name].shape, generator=generator, dtype=torch.float64)


def tensor_axis(world_size: int) -> ConnectedAxis:
    grid = Grid(tensor_size=world_size)
    return make_groups(grid, torch.device("cpu"), timedelta(seconds=60)).tensor_sums


def part_of(name: str, rank: int, ranks: int, gradient: Tensor) -> ParameterPart:
    """A rank's part of a weight that is zero, with its part of the gradient."""
    matrix = MATRICES[name]
    pieces = matrix.pieces(rank, ranks)
    shape = tuple(max(piece.local.stop[d] for piece in pieces) for d in range(2))
    parameter = nn.Parameter(torch.zeros(shape, dtype=gradient.dtype))
    own = torch.empty_like(parameter)
    for piece in pieces:
        own[piece.local.slices] = gradient[piece.box.slices]
    give_main_grad(parameter, own)
    owned = OwnedParameter(name, parameter, matrix.shape, pieces, matrices=matrix.experts)
    return ParameterPart.whole(owned)


def moved(
    rank: int, world_size: int, *, muon: MuonSettings, seed: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """This rank's updates by the first step."""
    config = OptimizerSettings(lr=1.0, optimizer="muon", muon=muon, weight_decay=0.0, clip_grad=0)
    parts = [
        part_of(name, rank, world_size, gradient_of(name, seed).to(dtype)) for name in MATRICES
    ]
    optimizer = make_optimizer(config, QKV, tensor_axis(world_size), ReferenceKernels(), parts)
    optimizer.step(Rates(1.0, 1.0, 0.0), grad_norm=1.0)
    return {part.name: -part.weight for part in parts}


def whole_of(name: str, by_rank: list[dict[str, Tensor]]) -> Tensor:
    found = torch.full(MATRICES[name].shape, torch.nan, dtype=by_rank[0][name].dtype)
    for rank, own in enumerate(by_rank):
        for piece in MATRICES[name].pieces(rank, len(by_rank)):
            found[piece.box.slices] = own[name][piece.local.slices]
    return found


def rows_of_matrices(name: str, rows: int, experts: int) -> Iterator[list[int]]:
    """The rows of every matrix that counts by itself."""
    bounds = [(0, 4), (4, 6), (6, 8)] if name == QKV_NAME else [(0, rows)]
    every = 8 if name == QKV_NAME else rows // experts
    if experts > 1:
        yield from (list(range(first, first + every)) for first in range(0, rows, every))
        return
    for begin, end in bounds:
        yield [row for row in range(rows) if begin <= row % every < end]


def updates_of(name: str, gradient: Tensor) -> Tensor:
    """Updates of the matrices in a gradient by singular values; lengths of mode ``spectral``."""
    found = torch.empty_like(gradient)
    for rows in rows_of_matrices(name, len(gradient), MATRICES[name].experts):
        own = gradient[rows]
        found[rows] = polar(own) * math.sqrt(max(own.shape))
    return found


def muon_of(mode: SharedMatrices, **how: Any) -> MuonSettings:
    return MuonSettings(
        muon_momentum=0.0, muon_tp_mode=mode, **({"muon_fp32_matmul_prec": "highest"} | how)
    )


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("mode", ["distributed", "duplicated"])
def test_slices_are_those_of_the_whole_update(
    mode: SharedMatrices, size: int, seed: int, ranks: RankPool
) -> None:
    """Of cuts of rows and of columns, of the longer and the shorter side; fused, and of experts."""
    by_rank = ranks.run(moved, size, muon=muon_of(mode), seed=seed, dtype=torch.float64)
    for name in MATRICES:
        expected = updates_of(name, gradient_of(name, seed))
        found = whole_of(name, by_rank)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=name)


def test_products_in_bf16_differ_by_their_rounding_alone(ranks: RankPool) -> None:
    muon = muon_of("distributed", muon_fp32_matmul_prec="medium")
    by_rank = ranks.run(moved, 4, muon=muon, seed=2, dtype=torch.float32)
    for name in MATRICES:
        expected = updates_of(name, gradient_of(name, 2))
        error = (whole_of(name, by_rank) - expected).norm() / expected.norm()
        assert 1e-4 < error < 0.05, name


def test_a_length_is_that_of_the_whole_matrix(ranks: RankPool) -> None:
    """Mode unit_rms_norm tells rows from columns."""
    muon = muon_of("distributed", muon_scale_mode="unit_rms_norm", muon_split_qkv=False)
    by_rank = ranks.run(moved, 2, muon=muon, seed=3, dtype=torch.float64)
    for name in (QKV_NAME, f"{LAYER}mlp.flat.weight", f"{LAYER}mlp.narrow.weight"):
        gradient = gradient_of(name, 3)
        expected = polar(gradient) * math.sqrt(len(gradient) / gradient.shape[1])
        torch.testing.assert_close(whole_of(name, by_rank), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [1, 2])
def test_blockwise_takes_every_slice_for_a_matrix(size: int, ranks: RankPool) -> None:
    by_rank = ranks.run(moved, size, muon=muon_of("blockwise"), seed=4, dtype=torch.float64)
    for rank, own in enumerate(by_rank):
        for name in MATRICES:
            slice_of = part_of(name, rank, size, gradient_of(name, 4)).gradient
            expected = updates_of(name, slice_of)
            torch.testing.assert_close(own[name], expected, rtol=1e-9, atol=1e-9, msg=name)


def sizes_sent(
    rank: int, world_size: int, *, shape: tuple[int, int], cut: int
) -> list[tuple[str, int]]:
    """Collectives that a slice of a matrix takes, each with the number of elements of a rank."""
    own = torch.randn(shape, dtype=torch.float64)
    axis, sent = tensor_axis(world_size), list[tuple[str, int]]()

    def recording(kind: str) -> Any:
        plain = getattr(collectives, kind)

        def call(tensor: Tensor, *args: Any) -> Any:
            sent.append((kind, tensor.numel()))
            return plain(tensor, *args)

        return patch.object(collectives, kind, call)

    kinds = ("all_reduce", "all_to_all", "all_gather")
    with recording(kinds[0]), recording(kinds[1]), recording(kinds[2]):
        orthogonalized_slice(own, cut, axis, STEPS, "highest")
    return sent


@pytest.mark.parametrize(
    ("whole", "cut", "exchanges"),
    [((12, 6), 0, False), ((6, 12), 1, False), ((8, 8), 0, False), ((6, 12), 0, True),
     ((12, 6), 1, True)],
)  # fmt: skip
def test_ranks_sum_products_of_the_smaller_side_and_gather_no_matrix(
    whole: tuple[int, int], cut: int, exchanges: bool, ranks: RankPool
) -> None:
    own = [*whole]
    own[cut] //= 2
    [sent, other] = ranks.run(sizes_sent, 2, shape=tuple(own), cut=cut)
    there_and_back = [("all_to_all", math.prod(own))] if exchanges else []
    sums = [("all_reduce", min(whole) ** 2)] * len(STEPS)
    assert sent == other == [("all_reduce", 1), *there_and_back, *sums, *there_and_back]


def test_only_a_shared_matrix_is_cut() -> None:
    found = {name: cut_dimension(part_of(name, 1, 2, gradient_of(name, 0))) for name in MATRICES}
    assert found == {name: matrix.cut for name, matrix in MATRICES.items()}
