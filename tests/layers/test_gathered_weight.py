"""Weights whose rows are rounded apart: the bits are those of the whole weight."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megatron.kernels.choose import kernels_for
from megatron.kernels.eight_bits import E4M3, EightBits
from megatron.kernels.face import Kernels
from megatron.layers import gathered_weight
from megatron.layers.block_multiplier import BlockMultiplier, GroupedBlockMultiplier, InBlocks
from megatron.layers.eight_bits import Multiplier
from megatron.layers.experts.eight_bit_products import GroupedMultiplier
from megatron.layers.gathered_weight import GatheredWeight
from megatron.layers.kernel_multiplier import KernelMultiplier, Quantised
from megatron.layers.scales import OwnScales

MATRICES, ROWS, COLUMNS = 3, 272, 320
"""Of the layer of experts; blocks at both edges are smaller than 128 x 128."""


def weight_of(matrices: int, *, in_squares: bool) -> GatheredWeight:
    """A weight without a layer."""
    return GatheredWeight(matrices, ROWS, COLUMNS, in_squares, E4M3, lambda bits, worths: None)


def kernels() -> Kernels:
    return kernels_for(torch.device("cpu"), torch.bfloat16)


def multiplier(in_squares: bool, matrices: Tensor) -> Multiplier[InBlocks] | Multiplier[Quantised]:
    """The multiplier of a linear layer, or of experts if there are several matrices."""
    one, dtype = len(matrices) == 1, torch.bfloat16
    if in_squares:
        return (BlockMultiplier if one else GroupedBlockMultiplier)(kernels(), dtype, "e4m3")
    scaling = OwnScales(kernels())
    if one:
        return KernelMultiplier(kernels(), dtype, "e4m3", scaling)
    return GroupedMultiplier(kernels(), dtype, "e4m3", scaling, matrices)


def random_weight(matrices: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    weight_gnk = torch.randn(matrices, ROWS, COLUMNS, generator=generator)
    weight_gnk *= torch.logspace(-3, 1, ROWS * COLUMNS).view(ROWS, COLUMNS)
    return weight_gnk.bfloat16()


def rounded_apart(own: GatheredWeight, rows_rk: Tensor, cuts: list[int]) -> tuple[Tensor, Tensor]:
    """Bits and worths of a weight that replicas round, each its rows between two ``cuts``."""
    parts = list(pairwise(cuts))
    largest = []
    for first, last in parts:
        largest.append(torch.zeros(own.blocks))
        own.raise_to_largest(largest[-1], rows_rk[first:last], first)
    scale_gbc, worth_gbc = own.scales(torch.stack(largest).amax(0))
    bits_rk = torch.empty_like(rows_rk, dtype=E4M3)
    for first, last in parts:
        own.round_rows(bits_rk[first:last], rows_rk[first:last], first, scale_gbc)
    return bits_rk, worth_gbc


def assert_alike(found: EightBits, wanted: EightBits) -> None:
    assert found.bits.shape == wanted.bits.shape
    assert torch.equal(found.bits.view(torch.uint8), wanted.bits.view(torch.uint8))
    assert found.worth.shape == wanted.worth.shape
    assert torch.equal(found.worth, wanted.worth)


@pytest.mark.parametrize("in_squares", [True, False], ids=["blockwise", "tensorwise"])
@pytest.mark.parametrize("matrices", [1, MATRICES])
@pytest.mark.parametrize("cuts", [(), (1,), (128, 271), (100, 101, 250)], ids=str)
@pytest.mark.parametrize("at_once", [100, 5000, gathered_weight.AT_ONCE])
def test_rows_rounded_apart_are_those_of_the_whole(
    in_squares: bool,
    matrices: int,
    cuts: tuple[int, ...],
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathered_weight, "AT_ONCE", at_once)
    weight_gnk = random_weight(matrices)
    rows_rk = weight_gnk.flatten(0, 1)
    own = weight_of(matrices, in_squares=in_squares)
    far = [len(rows_rk) - 150] if matrices > 1 else []
    bits_rk, worth_gbc = rounded_apart(own, rows_rk, [0, *cuts, *far, len(rows_rk)])
    multiplies = multiplier(in_squares, weight_gnk)
    wanted = multiplies.weight(rows_rk if matrices == 1 else weight_gnk)
    found = multiplies.gathered_weight(bits_rk, worth_gbc)
    assert found.leading == wanted.leading
    assert_alike(found.straight, wanted.straight)
    assert_alike(found.turned, wanted.turned)


@pytest.mark.parametrize("in_squares", [True, False], ids=["blockwise", "tensorwise"])
@pytest.mark.parametrize("fault", [torch.inf, torch.nan])
def test_a_number_that_is_not_finite_stays_so(in_squares: bool, fault: float) -> None:
    rows_rk = random_weight(1)[0]
    rows_rk[130, 40] = fault
    own = weight_of(1, in_squares=in_squares)
    bits_rk, worth_gbc = rounded_apart(own, rows_rk, [0, 100, ROWS])
    assert bits_rk[130, 40].isnan()
    assert worth_gbc.shape == own.blocks
