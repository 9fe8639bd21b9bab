"""The checksum sees any change of bits, and depends on nothing but bits and length."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.kernels.checksum import checksum

SIZES = [0, 1, 7, 8, 4096 * 8 - 1, 4096 * 8, 4096 * 8 * 3 + 13]


def by_hand(content: bytes) -> int:
    """The definition in exact integers: rows of 4096 words, then the rest, then the length."""
    padded = content + bytes(-len(content) % 8)
    words = [int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8)]
    full = len(content) // 8
    rows = full // 4096
    total = len(content) * 0x14057B7EF767814F
    for place, word in enumerate(words):
        r, c = divmod(place, 4096)
        if r < rows:
            factor = (r * 2 * 0x9E3779B97F4A7C1 | 1) + 2 * c * 0x2545F4914F6CDD1D
        elif place < full:
            factor = (place - rows * 4096) * 0x5851F42D4C957F2D * 2 + 1
        else:
            factor = 1
        total += factor * word
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


def test_order_counts_and_memory_does_not() -> None:
    values = torch.randn(3, 5000).bfloat16()
    same = torch.cat([torch.zeros(3, dtype=torch.bfloat16), values.flatten()])[3:].view(3, 5000)
    assert same.storage_offset() % 4
    assert checksum(same) == checksum(values)
    assert checksum(values.T.contiguous().T) == checksum(values)
    assert checksum(values.flip(0)) != checksum(values)
    assert checksum(values.flip(1)) != checksum(values)
    assert checksum(torch.tensor(0.0)) != checksum(torch.tensor(-0.0))
