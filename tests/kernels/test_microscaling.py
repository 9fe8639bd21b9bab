"""Products with a scale for every 32 numbers: by numpy and the OCP's text, and the same in Triton.

Nothing that is expected here comes from PyTorch's types of 8 bits or from this project's scales.
"""

import math
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.implementations import of_a_gpu, relative_error
from torch import Tensor

from megatron.kernels.counted import counted_kernels
from megatron.kernels.cuda import microscaling as cuda
from megatron.kernels.eight_bits import E4M3, E5M2, EightBits
from megatron.kernels.face import Kernels
from megatron.kernels.microscaling import SCALE, in_tiles, out_of_tiles, scales
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.planning.count.recorder import Recorder

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REFERENCE = ReferenceKernels()
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
TYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
WAYS = pytest.mark.parametrize("way", ["reference", pytest.param("cuda", marks=needs_triton)])
SIZES = [(32, 32), (160, 96), (128, 256), (288, 160)]
"""Rows and numbers of a row: less than a tile, part of two, whole tiles, and a rest."""

Numbers = npt.NDArray[np.float64]

MANTISSA = {E4M3: 3, E5M2: 2}
LEAST_EXPONENT = {E4M3: -6, E5M2: -14}
"""Of normal numbers (OCP 8-bit Floating Point Specification v1.0, table 1)."""
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of many magnitudes, so that scales differ; some groups are zeros."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-30, 30, (shape[0], shape[1] // 8), generator=generator))
    numbers = torch.randn(shape, generator=generator) * spread.repeat_interleave(8, 1)
    numbers[:2] = 0
    return numbers.to(dtype).to(DEVICE)


def kernels_of(way: str) -> Kernels:
    return REFERENCE if way == "reference" else of_a_gpu(DEVICE, torch.float32)


def by_rows(kernels: Kernels, x: Tensor, dtype: torch.dtype) -> EightBits:
    found, none = kernels.quantise_mx(x, dtype, straight=True, turned=False)
    assert found is not None
    assert none is None
    return found


def by_columns(kernels: Kernels, x: Tensor, dtype: torch.dtype) -> EightBits:
    none, found = kernels.quantise_mx(x, dtype, straight=False, turned=True)
    assert found is not None
    assert none is None
    return found


def exponents(groups: Numbers, dtype: torch.dtype) -> npt.NDArray[np.int64]:
    """The least exponents by whose powers of two no number of a group is too large."""
    largest = np.abs(groups).max(-1)
    fraction, exponent = np.frexp(np.where(largest > 0, largest, 1.0) / LARGEST[dtype])
    # A quotient 2^e exactly has fraction 0.5 and exponent e + 1.
    return np.where(fraction == 0.5, exponent - 1, exponent).astype(np.int64)


def nearest(x: Numbers, dtype: torch.dtype) -> Numbers:
    """The nearest number of a type, of two the even one."""
    exponent = np.frexp(np.where(x == 0, 1.0, x))[1] - 1
    step = np.exp2(np.maximum(exponent, LEAST_EXPONENT[dtype]).astype(float) - MANTISSA[dtype])
    rounded: Numbers = np.rint(x / step) * step
    return rounded


def expected(x: Tensor, dtype: torch.dtype) -> Numbers:
    """What the rows of a matrix stand for after rounding, by the OCP's text."""
    groups = x.double().cpu().numpy().reshape(len(x), -1, 32)
    scale = np.exp2(exponents(groups, dtype).astype(float))[..., None]
    found: Numbers = (nearest(groups / scale, dtype) * scale).reshape(x.shape)
    return found


def stands_for(factor: EightBits) -> Numbers:
    """What a factor stands for: its scales are read one by one where tensor cores read them."""
    r, k = factor.bits.shape
    numbers = factor.bits.double().cpu().numpy()
    scale = factor.worth.cpu().view(torch.uint8).numpy()
    across = -(-k // 128)
    for row in range(r):
        for group in range(k // 32):
            tile = (row // 128) * across + group // 4
            place = tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + group % 4
            numbers[row, group * 32 : group * 32 + 32] *= 2.0 ** (int(scale[place]) - 127)
    return numbers


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@WAYS
@TYPES
def test_rows_and_columns_are_rounded_as_the_specification_says(
    way: str, dtype: torch.dtype, size: tuple[int, int], kept: torch.dtype
) -> None:
    x, kernels = drawn(*size, seed=0, dtype=kept), kernels_of(way)
    straight, turned = kernels.quantise_mx(x, dtype, straight=True, turned=True)
    assert straight is not None
    assert turned is not None
    for found, matrix in ((straight, x), (turned, x.T)):
        assert (found.bits.shape, found.bits.dtype) == (matrix.shape, dtype)
        assert (found.worth.numel(), found.worth.dtype) == (scales(*matrix.shape), SCALE)
        assert np.array_equal(stands_for(found), expected(matrix, dtype))


@TYPES
@settings(max_examples=examples(200), deadline=None)
@given(magnitude=st.floats(2.0**-99, 2.0**119, width=32))
def test_no_number_is_cut_off_where_the_proposed_exponent_would(
    dtype: torch.dtype, magnitude: float
) -> None:
    """That exponent is of the largest power of two in the group; it is one less, or the same."""
    x = torch.full((32, 32), magnitude)
    worth = float(out_of_tiles(by_rows(REFERENCE, x, dtype).worth, 32, 32)[0, 0])
    most = LARGEST[dtype]
    proposed = 2.0 ** (math.frexp(magnitude)[1] - math.frexp(most)[1])
    assert worth == (2 * proposed if magnitude / proposed > most else proposed)
    assert most / 2 < magnitude / worth <= most


@needs_triton
@pytest.mark.parametrize("size", SIZES, ids=str)
@TYPES
def test_triton_rounds_to_the_same_bits(dtype: torch.dtype, size: tuple[int, int]) -> None:
    """Scales that no group has are the same, too: the tensor cores read them."""
    x, kernels = drawn(*size, seed=1), of_a_gpu(DEVICE, torch.float32)
    both = kernels.quantise_mx(x, dtype, straight=True, turned=True)
    wanted = REFERENCE.quantise_mx(x, dtype, straight=True, turned=True)
    alone = by_rows(kernels, x, dtype), by_columns(kernels, x, dtype)
    for found, single, want in zip(both, alone, wanted, strict=True):
        assert found is not None
        assert want is not None
        for own in (found, single):
            assert torch.equal(own.bits.view(torch.uint8), want.bits.view(torch.uint8))
            assert torch.equal(own.worth.view(torch.uint8), want.worth.view(torch.uint8))


@WAYS
def test_rows_of_any_number_can_be_rounded(way: str) -> None:
    """With weight gradients in 16 bits no product sums over them."""
    x = drawn(23, 64, seed=0)
    assert np.array_equal(stands_for(by_rows(kernels_of(way), x, E4M3)), expected(x, E4M3))


@WAYS
@pytest.mark.parametrize("fault", [math.inf, -math.inf, math.nan])
def test_a_fault_is_not_a_number_and_stays_in_its_group(way: str, fault: float) -> None:
    x = torch.ones(32, 64, device=DEVICE)
    x[3, 40] = fault
    for found, at in (
        (by_rows(kernels_of(way), x, E4M3), (3, 40)),
        (by_columns(kernels_of(way), x, E4M3), (40, 3)),
    ):
        numbers = stands_for(found)
        assert np.isnan(numbers[at])
        assert np.isnan(numbers).sum() == 1
        group = np.zeros_like(numbers, dtype=bool)
        group[at[0], at[1] // 32 * 32 :][:32] = True
        assert (numbers[~group] == 1).all()


@settings(max_examples=examples(50), deadline=None)
@given(rows=st.integers(1, 300), groups=st.integers(1, 12))
def test_tiles_are_laid_out_and_back(rows: int, groups: int) -> None:
    high, wide = -(-rows // 128) * 128, -(-groups // 4) * 4
    exponent = torch.randint(0, 255, (high, wide))
    tiles = in_tiles(exponent)
    assert tiles.numel() == scales(rows, groups * 32) == high * wide
    back = out_of_tiles(tiles, rows, groups * 32)
    assert torch.equal(back, torch.exp2(exponent[:rows, :groups].double() - 127).float())


def in_numpy(
    left_mk: Tensor,
    right_kn: Tensor,
    left_tiles: Tensor,
    right_tiles: Tensor,
    *,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor,
) -> None:
    """``torch._scaled_mm`` of such factors; it demands this of them (``ScaledBlas.cpp``)."""
    assert left_mk.is_contiguous()
    assert right_kn.T.is_contiguous()
    assert left_mk.shape[1] % 32 == right_kn.shape[1] % 16 == 0
    assert {left_mk.dtype, right_kn.dtype} != {E5M2}
    for matrix, tiles in ((left_mk, left_tiles), (right_kn.T, right_tiles)):
        assert tiles.dtype == torch.float8_e8m0fnu
        assert tiles.is_contiguous()
        assert tiles.numel() == -(-len(matrix) // 128) * 128 * (-(-matrix.shape[1] // 128) * 4)
    assert out.dtype == out_dtype
    assert bias is None or bias.dtype == out_dtype == torch.bfloat16
    exact = stands_for(EightBits(left_mk, left_tiles))
    exact = exact @ stands_for(EightBits(right_kn.T, right_tiles)).T
    out.copy_(torch.from_numpy(exact if bias is None else exact + bias.double().numpy()))


@pytest.fixture
def multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cuBLAS's product be there, on CPUs."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(torch, "_scaled_mm", in_numpy)
    elif cuda.lack_of_mx_products(DEVICE):
        pytest.skip("needs a GPU that multiplies with a scale for every 32 numbers")


def factors(m: int, n: int, k: int) -> tuple[EightBits, EightBits, Numbers]:
    """A gradient, a weight, and their exact product; groups of 8 numbers differ in magnitude."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(rows, k, generator=generator).to(DEVICE) for rows in (m, n))
    exact = expected(left, E5M2) @ expected(right, E4M3).T
    return by_rows(REFERENCE, left, E5M2), by_rows(REFERENCE, right, E4M3), exact


@pytest.mark.usefixtures("multiplies")
@pytest.mark.parametrize("bias", [False, True], ids=["alone", "bias"])
@WAYS
def test_a_product_is_of_the_values_of_its_factors(way: str, bias: bool) -> None:
    left, right, exact = factors(96, 160, 192)
    added = torch.randn(160, generator=torch.Generator().manual_seed(2)).to(DEVICE).bfloat16()
    kernels = kernels_of(way)
    found = kernels.mx_product(left, right, torch.bfloat16, added if bias else None)
    assert found.dtype == torch.bfloat16
    wanted = torch.from_numpy(exact).to(DEVICE) + (added.double() if bias else 0)
    assert relative_error(found, wanted) < 4e-3, "half a unit of bf16's last bit"
    assert relative_error(kernels.mx_product(left, right, torch.float32), exact_of(exact)) < 1e-6


def exact_of(numbers: Numbers) -> Tensor:
    return torch.from_numpy(numbers).to(DEVICE)


@pytest.mark.usefixtures("multiplies")
@pytest.mark.parametrize("sums", [torch.float32, torch.bfloat16], ids=str)
@WAYS
def test_gradients_of_weights_are_added(way: str, sums: torch.dtype) -> None:
    left, right, exact = factors(160, 96, 64)
    kernels, within = kernels_of(way), 1e-6 if sums == torch.float32 else 8e-3
    total = torch.full((160, 96), math.nan, device=DEVICE, dtype=sums)
    kernels.accumulate_mx_product_(total, left, right, begins=True)
    assert relative_error(total, exact_of(exact)) < within
    kernels.accumulate_mx_product_(total, left, right, begins=False)
    assert relative_error(total, 2 * exact_of(exact)) < within


def test_the_product_before_its_addition_is_counted() -> None:
    """One matrix in fp32, while it is formed and added; the first product needs none."""
    o, i, p = 256, 128, 4096
    grad, x = (
        EightBits(
            torch.empty(width, p, dtype=E4M3, device="meta"),
            torch.empty(scales(width, p), dtype=SCALE, device="meta"),
        )
        for width in (o, i)
    )
    total, kernels = torch.empty(o, i, device="meta"), counted_kernels(torch.bfloat16)
    found: dict[bool, list[Any]] = {}
    for begins in (True, False):
        recorder = Recorder()
        with recorder, recorder.recording() as works:
            kernels.accumulate_mx_product_(total, grad, x, begins=begins)
        found[begins] = list(works)
    assert max(work.peak for work in found[True]) == 0
    assert max(work.peak for work in found[False]) == 4 * o * i


@pytest.mark.parametrize(
    ("capability", "version", "words"),
    [
        ((9, 0), "12.9", ["compute capability 9.0", "from 10.0 on"]),
        ((10, 0), "12.6", ["CUDA 12.6", "since 12.8"]),
        ((10, 0), "12.8", None),
        ((12, 0), "13.0", None),
    ],
)
def test_the_reason_why_a_gpu_cannot_multiply(
    capability: tuple[int, int],
    version: str,
    words: list[str] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA X")
    monkeypatch.setattr(torch.version, "cuda", version)
    lack = cuda.lack_of_mx_products(0)
    if words is None:
        assert lack is None
    else:
        assert lack is not None
        assert all(word in lack for word in words), lack
