"""Numbers of 8 bits: their rounding by arithmetic alone, their products by PyTorch's own."""

import math
from functools import cache, reduce
from importlib.util import find_spec

import pytest
import torch
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.implementations import of_a_gpu
from reference.plain_eight_bits import E4M3 as PLAIN_E4M3
from reference.plain_eight_bits import E5M2 as PLAIN_E5M2
from torch import Tensor

from megatron.kernels.eight_bits import E4M3, E5M2, LEAST, EightBits, largest_number
from megatron.kernels.face import Kernels
from megatron.kernels.reference.kernels import ReferenceKernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
PLAIN = {E4M3: PLAIN_E4M3, E5M2: PLAIN_E5M2}
TYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
WAYS = ["reference", pytest.param("cuda", marks=needs_triton)]
"""The second on a GPU, or else in Triton's interpreter with PyTorch's own products."""


@pytest.fixture(params=WAYS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return made(request.param)


@cache
def made(way: str) -> Kernels:
    return ReferenceKernels() if way == "reference" else of_a_gpu(DEVICE, torch.bfloat16)


def quantised(kernels: Kernels, x_rk: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    bits_rk, turned_kr = kernels.quantise(
        x_rk.to(DEVICE), torch.tensor(scale, device=DEVICE), dtype, straight=True, turned=True
    )
    assert bits_rk is not None
    assert turned_kr is not None
    assert torch.equal(turned_kr.view(torch.uint8), bits_rk.view(torch.uint8).T)
    assert turned_kr.is_contiguous()
    return bits_rk.cpu()


def numbers(dtype: torch.dtype) -> Tensor:
    """All finite numbers of a type."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return every[every.isfinite()]


@TYPES
def test_rounds_to_the_nearest_number(kernels: Kernels, dtype: torch.dtype) -> None:
    own = numbers(dtype)
    ordered = own.unique()
    between = torch.cat((ordered, (ordered[1:] + ordered[:-1]) / 2))
    around = [between * (1 + bend) for bend in (0.0, 1e-6, -1e-6, 1e-3, -1e-3)]
    x = torch.cat(around).view(1, -1)
    assert torch.equal(quantised(kernels, x, dtype).double(), PLAIN[dtype].rounded(x))


@TYPES
def test_what_is_too_large_is_cut_off_and_what_is_no_number_stays_none(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    most = largest_number(dtype)
    x = torch.tensor([[most * 1.01, -most * 5, 3e38, math.inf, -math.inf, math.nan, 0.0, -0.0]])
    [found] = quantised(kernels, x, dtype).float().tolist()
    assert found[:3] == [most, -most, most]
    assert all(map(math.isnan, found[3:6]))
    assert found[6:] == [0.0, 0.0]


@pytest.mark.parametrize("way", WAYS)
@TYPES
@settings(max_examples=examples(60), deadline=None)
@given(
    exponent=st.integers(-60, 100),
    values=st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=40),
)
def test_a_round_trip_is_off_by_half_a_step(
    way: str, dtype: torch.dtype, exponent: int, values: list[float]
) -> None:
    """Of a number's own size, or of the smallest step, which depends on the largest number."""
    kernels = made(way)
    x = torch.tensor([values]) * 2.0**exponent
    amax = max(float(kernels.largest(x)), LEAST)
    scale = largest_number(dtype) / amax
    back = quantised(kernels, x, dtype, scale).double() / scale
    steps = 2.0 ** -(PLAIN[dtype].mantissa + 1)
    least = 2.0 ** (PLAIN[dtype].least - PLAIN[dtype].mantissa - 1) / scale
    allowed = torch.maximum(x.double().abs() * steps, torch.tensor(least)) * (1 + 1e-6)
    assert bool(((back - x.double()).abs() <= allowed).all())
    assert bool((back.abs() <= amax * (1 + 1e-6)).all())


def test_the_largest_magnitude(kernels: Kernels) -> None:
    x = torch.tensor([[1.0, -3.5], [0.0, 2.0]], dtype=torch.bfloat16, device=DEVICE)
    assert kernels.largest(x).item() == 3.5
    assert kernels.largest(x).dtype == torch.float32
    assert kernels.largest(torch.zeros(2, 2, device=DEVICE)).item() == 0.0
    assert kernels.largest(torch.tensor([1.0, -math.inf], device=DEVICE)).item() == math.inf


def test_the_largest_magnitude_that_was_seen_is_raised_and_never_lowered(kernels: Kernels) -> None:
    seen, one = torch.tensor([2.0, 1.0], device=DEVICE).unbind()
    for x, expected in ((1.5, 2.0), (-4.0, 4.0), (3.0, 4.0)):
        x_rk = torch.tensor([[x]], device=DEVICE)
        kernels.quantise(x_rk, one, E4M3, straight=True, turned=False, seen=seen)
        assert seen.item() == expected


@pytest.mark.parametrize("bias", [False, True], ids=["alone", "bias"])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("left", [E4M3, E5M2], ids=str)
def test_products_are_those_of_pytorch(
    kernels: Kernels, left: torch.dtype, out: torch.dtype, bias: bool
) -> None:
    """Which knows another emulation on CPUs, and tensor cores elsewhere."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    worth_a, worth_b = (torch.tensor(worth, device=DEVICE) for worth in (0.5, 3.0))
    a, b = EightBits(drawn(32, 48).to(left), worth_a), EightBits(drawn(16, 48).to(E4M3), worth_b)
    added = drawn(16).bfloat16() if bias and out == torch.bfloat16 else None
    theirs = torch._scaled_mm(a.bits, b.bits.T, a.worth, b.worth, bias=added, out_dtype=out)
    ours = kernels.eight_bit_product(a, b, out, added)
    assert ours.dtype == theirs.dtype == out
    torch.testing.assert_close(
        ours, theirs, rtol=1.6e-2 if out == torch.bfloat16 else 1e-5, atol=1e-5
    )
    exact = 1.5 * a.bits.double() @ b.bits.double().T
    terms = 1.5 * a.bits.double().abs() @ b.bits.double().abs().T
    if added is not None:
        exact += added
    rounding = exact.abs() * (2**-8 if out == torch.bfloat16 else 2**-20)
    if DEVICE.type == "cuda":  # whose tensor cores add with fewer bits than fp32 has
        rounding += 2**-13 * terms
    assert bool(((ours.double() - exact).abs() <= rounding + 1e-6).all())


def test_sums_begin_and_go_on(kernels: Kernels) -> None:
    parts = [
        EightBits(torch.full((16, 16), value, device=DEVICE).to(E4M3), torch.tensor(0.5).to(DEVICE))
        for value in (1.0, 2.0)
    ]
    total = torch.full((16, 16), math.nan, device=DEVICE)
    for number, part in enumerate(parts):
        kernels.accumulate_eight_bit_product_(total, part, part, torch.bfloat16, begins=number == 0)
    expected = reduce(lambda a, b: a + b, (16 * (0.5 * value) ** 2 for value in (1.0, 2.0)))
    assert torch.equal(total.cpu(), torch.full((16, 16), expected))


@pytest.mark.parametrize("shape", [(1, 1), (65, 130), (64, 64), (3, 200)], ids=str)
def test_the_shape_does_not_matter_nor_do_strides(kernels: Kernels, shape: tuple[int, int]) -> None:
    wide = torch.randn(shape[0], shape[1] + 3, generator=torch.Generator().manual_seed(0))
    for x in (wide[:, : shape[1]].bfloat16(), wide.T[: shape[1]].bfloat16()):
        scale = 448.0 / float(kernels.largest(x.to(DEVICE)))
        assert scale == pytest.approx(448.0 / float(x.abs().max()))
        found = quantised(kernels, x, E4M3, scale)
        assert torch.equal(found.double(), PLAIN_E4M3.rounded(x.float() * scale))
