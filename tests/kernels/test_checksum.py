"""The checksum sees any change of bits, and depends on nothing but bits and length."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.kernels.checksum import _table, checksum

SIZES = [0, 1, 3, 4, 4096 * 4 - 1, 4096 * 4, 4096 * 4 * 3 + 13, 4096 * 4 * 33 + 2]


def signed(number: int, bits: int) -> int:
    half = 1 << (bits - 1)
    return (number + half) % (2 * half) - half


def mixed(number: int) -> int:
    """A shift copies the sign, as in Python."""
    number = signed(number, 64)
    return (number ^ number >> 32) * 0x14057B7EF767814F


def by_hand(content: bytes) -> int:
    """The definition in exact integers: rows of 4096 words, then the rest, then the length."""
    padded = content + bytes(-len(content) % 4)
    words = [int.from_bytes(padded[at : at + 4], "little") for at in range(0, len(padded), 4)]
    full = len(content) // 4
    rows = full // 4096
    total = len(content) * 0x14057B7EF767814F
    for place, word in enumerate(words):
        r, c = divmod(place, 4096)
        if r < rows:
            factor = (mixed(r * 0x9E3779B97F4A7C1) | 1) + 2 * mixed(c * 0x2545F4914F6CDD1D)
        elif place < full:
            factor = mixed((place - rows * 4096) * 0x5851F42D4C957F2D) | 1
        else:
            factor = 1
        total += factor * signed(word, 32)
    return total % 2**64


@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_sum_of_the_definition(size: int) -> None:
    content = np.random.default_rng(size).bytes(size)
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8) if size else torch.empty(0)
    assert checksum(tensor).item() % 2**64 == by_hand(content)


@given(
    st.integers(0, 8 * 4096 * 2 + 20), st.integers(0, 7), st.sampled_from([1, 3 * 4096 * 8 // 2])
)
def test_every_single_bit_counts(place: int, bit: int, more: int) -> None:
    tensor = torch.zeros(8 * 4096 * 2 + 20 + more, dtype=torch.uint8)
    before = checksum(tensor)
    tensor[place] ^= 1 << bit
    assert checksum(tensor) != before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 4096, 3 * 4096, 2**18, 2**18 + 5])
def test_signs_that_change_together_count(dtype: torch.dtype, size: int) -> None:
    """Sums of words of 64 bits lose two flips of bit 63: twice 2**63 is a multiple of 2**64."""
    values = torch.ones(size, dtype=dtype)
    before, every = checksum(values), torch.arange(size)
    for places in (every, every[1::2], every[3::4], every[[0, -1]], every[1::2][:2], every[:2]):
        changed = values.clone()
        changed[places] = -changed[places]
        assert not len(places) or checksum(changed) != before, places


@given(
    st.lists(st.integers(0, 4 * 4096 * 2 + 4095), min_size=2, max_size=2, unique=True),
    st.lists(st.sampled_from([0, 1, 7, 15, 23, 30, 31]), min_size=2, max_size=2),
)
def test_any_two_bits_count(places: list[int], bits: list[int]) -> None:
    words = torch.from_numpy(np.random.default_rng(1).integers(-(2**31), 2**31, 9 * 4096))
    words = words.to(torch.int32)
    before = checksum(words)
    for place, bit in zip(places, bits, strict=True):
        words[place] ^= 1 << bit if bit < 31 else -(2**31)
    assert checksum(words) != before


def test_all_signs_of_a_gibibyte_count() -> None:
    """Factors that grow evenly from row to row add up to a multiple of 2**33 there."""
    one, minus = (
        torch.tensor(value).view(torch.int32).expand(2**16, 4096) for value in (1.0, -1.0)
    )
    assert _table(one) != _table(minus)


def test_order_counts_and_memory_does_not() -> None:
    values = torch.randn(3, 5000).bfloat16()
    same = torch.cat([torch.zeros(3, dtype=torch.bfloat16), values.flatten()])[3:].view(3, 5000)
    assert same.storage_offset() % 4
    assert checksum(same) == checksum(values)
    assert checksum(values.T.contiguous().T) == checksum(values)
    assert checksum(values.flip(0)) != checksum(values)
    assert checksum(values.flip(1)) != checksum(values)
    assert checksum(torch.tensor(0.0)) != checksum(torch.tensor(-0.0))
