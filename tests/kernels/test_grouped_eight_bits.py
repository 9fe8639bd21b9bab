"""Products of groups in 8 bits: Triton's programs against the loop over groups."""

from importlib.util import find_spec

import pytest
import torch
from kernels.implementations import of_a_gpu, relative_error
from torch import Tensor

from megatron.kernels.eight_bits import E4M3, E5M2, EightBits, places
from megatron.kernels.reference.kernels import ReferenceKernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REFERENCE = ReferenceKernels()
SIZES = (70, 0, 1, 16, 30)
"""Rows of every group: more than a tile, none, one, and a multiple of 16."""
WIDE = 80

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def ends(sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor(sizes, device=DEVICE).cumsum(0).int()


def drawn(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE)


def scales(seed: int) -> Tensor:
    return drawn(len(SIZES), seed=seed).abs() * 100 + 1


def same_bits(own: Tensor | None, want: Tensor | None) -> bool:
    assert own is not None
    assert want is not None
    return own.dtype == want.dtype and torch.equal(own.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_groups_are_rounded_alike(dtype: torch.dtype) -> None:
    x, own_ends = drawn(sum(SIZES), WIDE, seed=0), ends(SIZES)
    kernels, found = of_a_gpu(DEVICE, torch.float32), []
    for each in (kernels, REFERENCE):
        largest = torch.zeros(len(SIZES), device=DEVICE)
        largest[2] = 50.0
        bits = each.quantise_groups(
            x, scales(1), own_ends, dtype, straight=True, turned=True, seen_g=largest
        )
        found.append((*bits, largest, each.largest_of_groups(x, own_ends)))
    (straight, turned, *seen), (want, wanted_turned, *wanted_seen) = found
    assert same_bits(straight, want)
    assert turned is not None
    assert wanted_turned is not None
    assert turned.shape == wanted_turned.shape == (WIDE, places(sum(SIZES), len(SIZES)))
    used = sum(-(-size // 16) * 16 for size in SIZES)
    assert same_bits(turned[:, :used].contiguous(), wanted_turned[:, :used].contiguous())
    assert all(map(torch.equal, seen, wanted_seen))
    assert not wanted_seen[1][1]


def test_matrices_are_rounded_alike() -> None:
    x = drawn(len(SIZES), 48, WIDE, seed=0)
    own_ends = ends((48,) * len(SIZES))
    kernels = of_a_gpu(DEVICE, torch.float32)
    found = kernels.quantise_matrices(x, scales(1), own_ends, E4M3)
    wanted = REFERENCE.quantise_matrices(x, scales(1), own_ends, E4M3)
    assert all(map(same_bits, found, wanted))
    assert same_bits(found[1], found[0].transpose(1, 2).contiguous())


@pytest.mark.parametrize("quick", [False, True], ids=["exact", "quick"])
def test_rows_are_multiplied_alike(quick: bool) -> None:
    own_ends = ends(SIZES)
    left = EightBits(drawn(sum(SIZES), WIDE, seed=0).to(E5M2), scales(1))
    right = EightBits(drawn(len(SIZES), 48, WIDE, seed=2).to(E4M3), scales(3))
    kernels = of_a_gpu(DEVICE, torch.float32)
    given = left, right, own_ends, torch.float32
    found = kernels.grouped_eight_bit_product(*given, quick=quick)
    wanted = REFERENCE.grouped_eight_bit_product(*given, quick=quick)
    assert relative_error(found, wanted) < 1e-6


def test_gradients_of_matrices_are_multiplied_and_added_alike() -> None:
    own_ends = ends(SIZES)
    factors = []
    for width, seed, dtype in ((48, 0, E5M2), (WIDE, 1, E4M3)):
        rows = drawn(sum(SIZES), width, seed=seed)
        _, turned = REFERENCE.quantise_groups(
            rows, scales(2), own_ends, dtype, straight=False, turned=True
        )
        assert turned is not None
        factors.append(EightBits(turned, scales(3)))
    kernels = of_a_gpu(DEVICE, torch.float32)
    grad, x = factors
    found, wanted = (
        each.grouped_eight_bit_weight_product(grad, x, own_ends, torch.float32)
        for each in (kernels, REFERENCE)
    )
    assert relative_error(found, wanted) < 1e-6
    assert not found[1].any(), "a group without rows"
    total = drawn(*wanted.shape, seed=4)
    wanted += total
    kernels.accumulate_grouped_eight_bit_product_(total, grad, x, own_ends, begins=False)
    assert relative_error(total, wanted) < 1e-6
