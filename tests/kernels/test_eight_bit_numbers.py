"""Numbers of 8 bits: their rounding by arithmetic alone, their products by PyTorch's own."""

import math
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.plain_eight_bits import E4M3 as PLAIN_E4M3
from reference.plain_eight_bits import E5M2 as PLAIN_E5M2
from torch import Tensor

from megatron.kernels.eight_bits import E4M3, E5M2, LEAST, EightBits, largest_number
from megatron.kernels.face import Kernels
from megatron.kernels.reference.kernels import ReferenceKernels

PLAIN = {E4M3: PLAIN_E4M3, E5M2: PLAIN_E5M2}
TYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
REFERENCE = ReferenceKernels()


def quantised(
    x_rk: Tensor, dtype: torch.dtype, scale: float = 1.0, kernels: Kernels = REFERENCE
) -> Tensor:
    bits_rk, turned_kr = kernels.quantise(
        x_rk, torch.tensor(scale), dtype, straight=True, turned=True
    )
    assert bits_rk is not None
    assert turned_kr is not None
    assert torch.equal(turned_kr.view(torch.uint8), bits_rk.view(torch.uint8).T)
    assert turned_kr.is_contiguous()
    return bits_rk


def numbers(dtype: torch.dtype) -> Tensor:
    """All finite numbers of a type."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return every[every.isfinite()]


@TYPES
def test_rounds_to_the_nearest_number(dtype: torch.dtype) -> None:
    own = numbers(dtype)
    ordered = own.unique()
    between = torch.cat((ordered, (ordered[1:] + ordered[:-1]) / 2))
    around = [between * (1 + bend) for bend in (0.0, 1e-6, -1e-6, 1e-3, -1e-3)]
    x = torch.cat(around).view(1, -1)
    assert torch.equal(quantised(x, dtype).double(), PLAIN[dtype].rounded(x))


@TYPES
def test_what_is_too_large_is_cut_off_and_what_is_no_number_stays_none(dtype: torch.dtype) -> None:
    most = largest_number(dtype)
    x = torch.tensor([[most * 1.01, -most * 5, 3e38, math.inf, -math.inf, math.nan, 0.0, -0.0]])
    [found] = quantised(x, dtype).float().tolist()
    assert found[:3] == [most, -most, most]
    assert all(map(math.isnan, found[3:6]))
    assert found[6:] == [0.0, 0.0]


@TYPES
@settings(max_examples=60, deadline=None)
@given(
    exponent=st.integers(-60, 100),
    values=st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=40),
)
def test_a_round_trip_is_off_by_half_a_step(
    dtype: torch.dtype, exponent: int, values: list[float]
) -> None:
    """Of a number's own size, or of the smallest step, which depends on the largest number."""
    x = torch.tensor([values]) * 2.0**exponent
    amax = max(float(REFERENCE.largest(x)), LEAST)
    scale = largest_number(dtype) / amax
    back = quantised(x, dtype, scale).double() / scale
    steps = 2.0 ** -(PLAIN[dtype].mantissa + 1)
    least = 2.0 ** (PLAIN[dtype].least - PLAIN[dtype].mantissa - 1) / scale
    allowed = torch.maximum(x.double().abs() * steps, torch.tensor(least)) * (1 + 1e-6)
    assert bool(((back - x.double()).abs() <= allowed).all())
    assert bool((back.abs() <= amax * (1 + 1e-6)).all())


def test_the_largest_magnitude() -> None:
    x = torch.tensor([[1.0, -3.5], [0.0, 2.0]], dtype=torch.bfloat16)
    assert REFERENCE.largest(x).item() == 3.5
    assert REFERENCE.largest(x).dtype == torch.float32
    assert REFERENCE.largest(torch.zeros(2, 2)).item() == 0.0
    assert REFERENCE.largest(torch.tensor([1.0, -math.inf])).item() == math.inf


def test_the_largest_magnitude_that_was_seen_is_raised_and_never_lowered() -> None:
    seen, one = torch.tensor(2.0), torch.tensor(1.0)
    for x, expected in ((1.5, 2.0), (-4.0, 4.0), (3.0, 4.0)):
        REFERENCE.quantise(torch.tensor([[x]]), one, E4M3, straight=True, turned=False, seen=seen)
        assert seen.item() == expected


@pytest.mark.parametrize("bias", [False, True], ids=["alone", "bias"])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("left", [E4M3, E5M2], ids=str)
def test_products_are_those_of_pytorch(left: torch.dtype, out: torch.dtype, bias: bool) -> None:
    """Which knows another emulation on CPUs, and tensor cores elsewhere."""
    generator = torch.Generator().manual_seed(1)
    a = EightBits(torch.randn(32, 48, generator=generator).to(left), torch.tensor(0.5))
    b = EightBits(torch.randn(16, 48, generator=generator).to(E4M3), torch.tensor(3.0))
    added = torch.randn(16, generator=generator, dtype=torch.bfloat16) if bias else None
    theirs = torch._scaled_mm(a.bits_rk, b.bits_rk.T, a.worth, b.worth, bias=added, out_dtype=out)
    ours = REFERENCE.eight_bit_product(a, b, out, added)
    assert ours.dtype == theirs.dtype == out
    torch.testing.assert_close(
        ours, theirs, rtol=1.6e-2 if out == torch.bfloat16 else 1e-5, atol=1e-5
    )
    exact = 1.5 * a.bits_rk.double() @ b.bits_rk.double().T + (
        0 if added is None else added.double()
    )
    tolerance = 2**-8 if out == torch.bfloat16 else 2**-20
    assert bool(((ours.double() - exact).abs() <= tolerance * exact.abs() + 1e-6).all())


def test_sums_begin_and_go_on() -> None:
    parts = [
        EightBits(torch.full((16, 16), value).to(E4M3), torch.tensor(0.5)) for value in (1.0, 2.0)
    ]
    total = torch.full((16, 16), math.nan)
    for number, part in enumerate(parts):
        REFERENCE.accumulate_eight_bit_product_(total, part, part, begins=number == 0)
    expected = reduce(lambda a, b: a + b, (16 * (0.5 * value) ** 2 for value in (1.0, 2.0)))
    assert torch.equal(total, torch.full((16, 16), expected))
