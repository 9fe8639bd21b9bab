"""Products in 8 bits with scales of blocks: by arithmetic alone, and the same in Triton's programs.

Groups of rows are a loop over single groups, to the last bit.
"""

import math
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.implementations import of_a_gpu, relative_error
from reference.plain_eight_bits import E4M3 as PLAIN_E4M3
from reference.plain_eight_bits import E5M2 as PLAIN_E5M2
from reference.plain_eight_bits import Rounding
from torch import Tensor

from megatron.kernels.counted import CountedGpu, counted_kernels
from megatron.kernels.cuda import block_products
from megatron.kernels.eight_bits import (
    BLOCK,
    E4M3,
    E5M2,
    LEAST,
    MULTIPLE,
    EightBits,
    block_places,
    largest_number,
    powers_of_two,
)
from megatron.kernels.face import Kernels
from megatron.kernels.reference.kernels import ReferenceKernels
from megatron.planning.count.recorder import Recorder

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REFERENCE = ReferenceKernels()
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
TYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
PLAIN = {E4M3: PLAIN_E4M3, E5M2: PLAIN_E5M2}
SIZES = (130, 0, 1, 128, 30)
"""Rows of every group: more than a block, none, one, a whole block, and a part of one."""
WIDE = 144
"""More than a block, and no multiple of it."""


def ends(sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor(sizes, device=DEVICE).cumsum(0).int()


def drawn(*shape: int, seed: int) -> Tensor:
    """Numbers of many magnitudes, so that scales of blocks differ."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator)
    return (numbers * torch.exp2(torch.randint(-9, 9, shape, generator=generator))).to(DEVICE)


def values(factor: EightBits | None, *, square: bool = False) -> Tensor:
    """What the rows of a factor stand for, float64."""
    assert factor is not None
    r, k = factor.bits.shape
    worth_rc = factor.worth.double() if square else factor.worth.T.double()
    if square:
        worth_rc = worth_rc.repeat_interleave(BLOCK, 0)[:r]
    return factor.bits.double() * worth_rc.repeat_interleave(BLOCK, 1)[:, :k]


def rounded(kernels: Kernels, x: Tensor, own_ends: Tensor | None, dtype: torch.dtype) -> Tensor:
    straight, _ = kernels.quantise_blocks(x, own_ends, dtype, straight=True, turned=False)
    return values(straight)


def turned_by(
    kernels: Kernels, x: Tensor, own_ends: Tensor | None, dtype: torch.dtype
) -> EightBits:
    _, turned = kernels.quantise_blocks(x, own_ends, dtype, straight=False, turned=True)
    assert turned is not None
    return turned


def used_columns(sizes: tuple[int, ...]) -> list[slice]:
    """The columns of every group where rows are turned, with the zeros behind."""
    found, first = [], 0
    for size in sizes:
        found.append(slice(first, first + -(-size // MULTIPLE) * MULTIPLE))
        first += -(-size // BLOCK) * BLOCK
    return found


@TYPES
@settings(max_examples=examples(200), deadline=None)
@given(magnitude=st.floats(LEAST, 2.0**120, width=32))
def test_a_scale_is_the_largest_power_of_two_that_fits(
    dtype: torch.dtype, magnitude: float
) -> None:
    scale, worth = (float(each) for each in powers_of_two(torch.tensor(magnitude), dtype))
    assert math.frexp(scale)[0] == 0.5
    assert scale * worth == 1.0
    assert scale * magnitude <= largest_number(dtype) < 2 * scale * magnitude


@TYPES
def test_scales_stay_finite(dtype: torch.dtype) -> None:
    for magnitude in (0.0, 1e-45, math.inf, math.nan):
        scale, worth = powers_of_two(torch.tensor(magnitude), dtype)
        assert 0 < float(scale) < math.inf
        assert 0 < float(worth) < math.inf


@pytest.mark.parametrize("way", ["reference", pytest.param("cuda", marks=needs_triton)])
@TYPES
def test_blocks_are_rounded_as_arithmetic_says(way: str, dtype: torch.dtype) -> None:
    kernels = REFERENCE if way == "reference" else of_a_gpu(DEVICE, torch.float32)
    x, plain = drawn(160, WIDE, seed=0), Rounding("blockwise", PLAIN[dtype])
    assert torch.equal(rounded(kernels, x, None, dtype), plain.rows(PLAIN[dtype], x))
    assert torch.equal(values(turned_by(kernels, x, None, dtype)).T, plain.columns(PLAIN[dtype], x))
    straight, turned = kernels.quantise_squares(x[None], dtype)
    expected = plain.rows(PLAIN[dtype], x, square=True)
    for found, wanted in ((straight, expected), (turned, expected.T)):
        own = EightBits(found.bits[0], found.worth[0])
        assert torch.equal(values(own, square=True), wanted)


@pytest.mark.parametrize("way", ["reference", pytest.param("cuda", marks=needs_triton)])
@pytest.mark.parametrize("fault", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_stays_none(way: str, fault: float) -> None:
    """And numbers of other blocks are as they were."""
    kernels = REFERENCE if way == "reference" else of_a_gpu(DEVICE, torch.float32)
    x = drawn(32, WIDE, seed=0)
    before = rounded(kernels, x, None, E4M3)
    x[3, 5] = fault
    after = rounded(kernels, x, None, E4M3)
    assert after[3, 5].isnan()
    assert after.isfinite().sum() == after.numel() - 1
    x_of_others = torch.ones_like(after, dtype=torch.bool)
    x_of_others[3, :BLOCK] = False
    assert torch.equal(after[x_of_others], before[x_of_others])


@TYPES
def test_groups_are_rounded_one_by_one(dtype: torch.dtype) -> None:
    x, own_ends = drawn(sum(SIZES), WIDE, seed=0), ends(SIZES)
    turned = turned_by(REFERENCE, x, own_ends, dtype)
    assert turned.bits.shape == (WIDE, block_places(sum(SIZES), len(SIZES)))
    assert turned.worth.shape == (-(-turned.bits.shape[1] // BLOCK), WIDE)
    whole = values(turned)
    for own, columns in zip(x.split(SIZES), used_columns(SIZES), strict=True):
        if len(own):
            wanted = values(turned_by(REFERENCE, own, None, dtype))
            assert torch.equal(whole[:, columns][:, : len(own)], wanted)
        assert not whole[:, columns][:, len(own) :].any()


@needs_triton
@TYPES
def test_groups_are_rounded_alike(dtype: torch.dtype) -> None:
    x, own_ends = drawn(sum(SIZES), WIDE, seed=0), ends(SIZES)
    kernels = of_a_gpu(DEVICE, torch.float32)
    assert torch.equal(rounded(kernels, x, own_ends, dtype), rounded(REFERENCE, x, own_ends, dtype))
    found, wanted = (turned_by(each, x, own_ends, dtype) for each in (kernels, REFERENCE))
    assert found.bits.shape == wanted.bits.shape
    for columns in used_columns(SIZES):
        own, want = (each.bits.view(torch.uint8)[:, columns] for each in (found, wanted))
        assert torch.equal(own, want)
    blocks = sum(-(-size // BLOCK) for size in SIZES)
    assert torch.equal(found.worth[:blocks], wanted.worth[:blocks])


@needs_triton
def test_squares_are_rounded_alike() -> None:
    x = drawn(3, 176, WIDE, seed=0)
    kernels = of_a_gpu(DEVICE, torch.float32)
    for found, wanted in zip(
        kernels.quantise_squares(x, E4M3), REFERENCE.quantise_squares(x, E4M3), strict=True
    ):
        assert torch.equal(found.bits.view(torch.uint8), wanted.bits.view(torch.uint8))
        assert torch.equal(found.worth, wanted.worth)


def factors(own_ends: Tensor | None, dtype: torch.dtype, rows: int) -> tuple[EightBits, EightBits]:
    """Rows, and a matrix for each of their groups."""
    left, _ = REFERENCE.quantise_blocks(
        drawn(rows, WIDE, seed=0), own_ends, dtype, straight=True, turned=False
    )
    assert left is not None
    groups = 1 if own_ends is None else len(own_ends)
    right, _ = REFERENCE.quantise_squares(drawn(groups, 176, WIDE, seed=1), E4M3)
    return left, right


@pytest.mark.parametrize("way", ["reference", pytest.param("cuda", marks=needs_triton)])
@pytest.mark.parametrize("bias", [False, True], ids=["alone", "bias"])
def test_a_product_is_of_the_values_of_its_factors(way: str, bias: bool) -> None:
    kernels = REFERENCE if way == "reference" else of_a_gpu(DEVICE, torch.float32)
    left, right = factors(None, E5M2, 96)
    added = drawn(176, seed=2) if bias else None
    found = kernels.grouped_block_product(left, right, None, torch.float32, added)
    matrix = EightBits(right.bits[0], right.worth[0])
    wanted = values(left) @ values(matrix, square=True).T
    assert relative_error(found, wanted if added is None else wanted + added) < 1e-6


@pytest.mark.parametrize("bias", [False, True], ids=["alone", "bias"])
def test_cublas_gets_what_it_demands(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of rows lie rows first, those of squares as their factor does, both in its order."""
    calls: list[tuple[Tensor, Tensor]] = []

    def product(
        left_sk: Tensor,
        right_kn: Tensor,
        left_worth_sc: Tensor,
        right_worth_cb: Tensor,
        *,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        out: Tensor,
    ) -> None:
        (s, k), n = left_sk.shape, right_kn.shape[1]
        assert left_sk.is_contiguous()
        assert right_kn.T.is_contiguous()
        assert (left_worth_sc.shape, left_worth_sc.stride()) == ((s, k // BLOCK), (1, s))
        assert right_worth_cb.shape == (k // BLOCK, n // BLOCK)
        assert right_worth_cb.T.is_contiguous()
        calls.append((left_sk, right_kn))
        own = EightBits(left_sk, left_worth_sc.T), EightBits(right_kn.T, right_worth_cb.T)
        exact = values(own[0]) @ values(own[1], square=True).T
        out.copy_(exact if bias is None else exact + bias)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    monkeypatch.setattr(block_products, "has_block_products", lambda device: True)
    left, _ = REFERENCE.quantise_blocks(
        drawn(32, 512, seed=0), None, E5M2, straight=True, turned=False
    )
    right, _ = REFERENCE.quantise_squares(drawn(1, 256, 512, seed=1), E4M3)
    assert left is not None
    added = drawn(256, seed=2).bfloat16() if bias else None
    given = left, right, None, torch.bfloat16, added
    found = block_products.CudaBlocks().grouped_block_product(*given)
    assert calls
    assert relative_error(found, REFERENCE.grouped_block_product(*given)) < 1e-3


@pytest.mark.parametrize(
    ("s", "k", "n", "dtype", "added", "takes"),
    [
        (16, 512, 128, torch.bfloat16, None, True),
        (16, 512, 128, torch.float32, None, True),
        (16, 512, 128, torch.bfloat16, torch.bfloat16, True),
        (16, 512, 128, torch.float32, torch.float32, False),
        (24, 512, 128, torch.bfloat16, None, False),
        (16, 640, 128, torch.bfloat16, None, False),
        (16, 512, 144, torch.bfloat16, None, False),
    ],
)
def test_cublas_is_asked_for_what_it_has_only(
    s: int, k: int, n: int, dtype: torch.dtype, added: torch.dtype | None, takes: bool
) -> None:
    out, bias = torch.empty(s, n, dtype=dtype), None if added is None else torch.empty(n).to(added)
    left, right = (torch.empty(rows, k).to(E4M3) for rows in (s, n))
    assert block_products.cublas_takes(out, left, right, bias) is takes


@pytest.mark.skipif(DEVICE.type == "cpu", reason="cuBLAS multiplies on a GPU only")
@pytest.mark.parametrize("bias", [False, True], ids=["alone", "bias"])
def test_cublas_and_triton_give_the_same_bits_on_a_gpu(bias: bool) -> None:
    kernels = of_a_gpu(DEVICE, torch.bfloat16)
    left, _ = kernels.quantise_blocks(
        drawn(64, 1024, seed=0).to(DEVICE), None, E5M2, straight=True, turned=False
    )
    right, _ = kernels.quantise_squares(drawn(1, 256, 1024, seed=1).to(DEVICE), E4M3)
    assert left is not None
    added = drawn(256, seed=2).to(DEVICE).bfloat16() if bias else None
    by_triton = torch.empty(64, 256, dtype=torch.bfloat16, device=DEVICE)
    block_products.grouped_block_product(
        by_triton, left.bits, left.worth, right.bits, right.worth, added, None
    )
    found = kernels.grouped_block_product(left, right, None, torch.bfloat16, added)
    assert torch.equal(found, by_triton)


@needs_triton
def test_rows_of_groups_are_multiplied_alike() -> None:
    own_ends = ends(SIZES)
    given = *factors(own_ends, E4M3, sum(SIZES)), own_ends, torch.float32
    found = of_a_gpu(DEVICE, torch.float32).grouped_block_product(*given)
    assert relative_error(found, REFERENCE.grouped_block_product(*given)) < 1e-6


@pytest.mark.parametrize("sizes", [SIZES, None], ids=["groups", "whole"])
@pytest.mark.parametrize("way", ["reference", pytest.param("cuda", marks=needs_triton)])
def test_gradients_of_matrices_are_multiplied_and_added(
    way: str, sizes: tuple[int, ...] | None
) -> None:
    kernels = REFERENCE if way == "reference" else of_a_gpu(DEVICE, torch.float32)
    rows, own_ends = (160, None) if sizes is None else (sum(sizes), ends(sizes))
    grad, x = (
        turned_by(REFERENCE, drawn(rows, width, seed=seed), own_ends, dtype)
        for width, seed, dtype in ((176, 0, E5M2), (WIDE, 1, E4M3))
    )
    wanted = torch.zeros(1 if sizes is None else len(sizes), 176, WIDE, dtype=torch.float64)
    for group, columns in enumerate([slice(rows)] if sizes is None else used_columns(sizes)):
        own, other = (values(each)[:, columns].cpu() for each in (grad, x))
        wanted[group] = own @ other.T
    found = kernels.grouped_block_weight_product(grad, x, own_ends, torch.float32)
    assert relative_error(found.cpu(), wanted) < 1e-6
    assert sizes is None or not found[1].any(), "a group without rows"
    total = drawn(*wanted.shape, seed=4)
    added = wanted + total.cpu()
    kernels.accumulate_grouped_block_product_(total, grad, x, own_ends, begins=False)
    assert relative_error(total.cpu(), added) < 1e-6
    total.fill_(math.nan)
    kernels.accumulate_grouped_block_product_(total, grad, x, own_ends, begins=True)
    assert relative_error(total.cpu(), wanted) < 1e-6


def product_of_turned(
    grad_op: Tensor,
    x_pi: Tensor,
    grad_worth_ob: Tensor,
    x_worth_bi: Tensor,
    *,
    out_dtype: torch.dtype,
    out: Tensor,
) -> None:
    """``torch._scaled_mm`` of two factors with blocks of 1 x 128; it demands these layouts."""
    (o, p), i = grad_op.shape, x_pi.shape[1]
    assert grad_op.is_contiguous()
    assert x_pi.T.is_contiguous()
    assert (grad_worth_ob.shape, grad_worth_ob.stride()) == ((o, p // BLOCK), (1, o))
    assert (x_worth_bi.shape, x_worth_bi.stride()) == ((p // BLOCK, i), (i, 1))
    assert out.dtype == out_dtype
    own = EightBits(grad_op, grad_worth_ob.T), EightBits(x_pi.T, x_worth_bi)
    out.copy_(values(own[0]) @ values(own[1]).T)


@needs_triton
@pytest.mark.parametrize("sums", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "inputs", "begins", "is_cublas"),
    [
        (256, 128, False, True),
        (128, 128, False, False),
        (128, 128, True, True),
        (272, 128, False, False),
        (256, 144, True, False),
    ],
)
def test_gradients_of_weights_by_cublas_are_added(
    rows: int,
    inputs: int,
    begins: bool,
    is_cublas: bool,
    sums: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If there are enough rows to make up for the addition, and cuBLAS has the product."""
    calls: list[torch.dtype] = []

    def product(*factors: Tensor, out_dtype: torch.dtype, out: Tensor) -> None:
        calls.append(out_dtype)
        product_of_turned(*factors, out_dtype=out_dtype, out=out)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    monkeypatch.setattr(block_products, "LEAST_ROWS", 256)
    kernels: Any = of_a_gpu(torch.device("cpu"), torch.bfloat16)
    kernels.has_block_products = True
    grad, x = (
        turned_by(REFERENCE, drawn(rows, width, seed=seed).cpu(), None, dtype)
        for width, seed, dtype in ((128, 0, E5M2), (inputs, 1, E4M3))
    )
    if DEVICE.type == "cuda" and not is_cublas:
        pytest.skip("the program runs on the GPU alone")
    total = drawn(1, 128, inputs, seed=4).cpu().to(sums)
    wanted = (values(grad) @ values(x).T)[None] + (0 if begins else total.double())
    if begins:
        total.fill_(math.nan)
    kernels.accumulate_grouped_block_product_(total, grad, x, None, begins=begins)
    assert relative_error(total, wanted) < (1e-6 if sums == torch.float32 else 1e-2)
    assert calls == ([sums if begins else torch.float32] if is_cublas else [])


def test_groups_are_not_cublas_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_products.CudaBlocks, "has_block_products", True)
    monkeypatch.setattr(
        block_products, "add_grouped_block_weight_product_", lambda *given: made.append(given[-1])
    )
    made: list[Tensor] = []
    own_ends = ends((256, 256))
    grad, x = (turned_by(REFERENCE, drawn(512, 128, seed=s), own_ends, E4M3) for s in (0, 1))
    total = torch.zeros(2, 128, 128)
    kernels = block_products.CudaBlocks()
    kernels.accumulate_grouped_block_product_(total, grad, x, own_ends, begins=False)
    assert made == [own_ends]


@pytest.mark.parametrize(
    ("o", "i", "p", "takes"),
    [(128, 256, 384, True), (144, 256, 384, False), (128, 144, 384, False), (128, 256, 400, False)],
)
def test_cublas_is_asked_for_gradients_that_it_has(o: int, i: int, p: int, takes: bool) -> None:
    factors = (torch.empty(rows, p).to(E4M3) for rows in (o, i))
    assert block_products.cublas_takes_weights(*factors) is takes


def test_the_product_before_its_addition_is_counted() -> None:
    """One matrix in fp32, while it is formed and added."""
    o, i, p = 256, 128, 4096
    grad, x = (
        EightBits(
            torch.empty(width, p, dtype=E4M3, device="meta"),
            torch.empty(p // BLOCK, width, device="meta"),
        )
        for width in (o, i)
    )
    total = torch.empty(1, o, i, device="meta")
    peaks = {}
    for has_them in (False, True):
        kernels = counted_kernels(torch.bfloat16, CountedGpu(has_block_products=has_them))
        recorder = Recorder()
        with recorder, recorder.recording() as works:
            kernels.accumulate_grouped_block_product_(total, grad, x, None, begins=False)
        peaks[has_them] = max(work.peak for work in works)
    assert peaks == {False: 0, True: 4 * o * i}


@settings(max_examples=examples(300), deadline=None)
@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=20))
def test_groups_fit_into_their_places(sizes: list[int]) -> None:
    *_, last = used_columns(tuple(sizes))
    assert last.stop <= block_places(sum(sizes), len(sizes))
    assert block_places(sum(sizes), 1) % MULTIPLE == 0
