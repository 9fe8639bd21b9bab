"""An exact checksum of a tensor's bits, in plain PyTorch operations on any device.

The bytes are read as signed words w of 32 bits, in a table of rows r and columns c. The checksum is

    sum over r, c of (a_r + b_c) w_rc   modulo 2**64, with a_r odd and b_c even.

Integers wrap around, so no order of additions changes the result. Every factor a_r + b_c has 64
bits and is odd, so a change of a single word always changes the checksum. A change of several words
escapes if its words, times their factors, add up to a multiple of 2**64. Two flips of bit 31, the
sign of an fp32 element, escape if the sum or the difference of their factors is a multiple of
2**33: with a chance of about 2**-32 for two places, as factors are odd. Lower bits escape more
rarely. A change that keeps the sum of every row and of every column always escapes; an example is
an element that grows, beside three others at the corners of a rectangle that make up for the
growth.

Some rows at a time are copied as 64-bit integers: PyTorch's sum would copy all of them at once.
"""

from typing import Final

import torch
from torch import Tensor

_COLUMNS: Final = 4096
"""Words of a row: 16 KiB."""

_ROWS_AT_ONCE: Final = {"cpu": 32, "cuda": 1024}
"""Rows that are copied at once, by the type of device: half a MiB, whose copy fits into a core's
cache, and 16 MiB."""

_WORD: Final = 4
"""Bytes of a word."""

_OF_ROWS: Final = 0x9E3779B97F4A7C1
_OF_COLUMNS: Final = 0x2545F4914F6CDD1D
_OF_REST: Final = 0x5851F42D4C957F2D
_OF_LENGTH: Final = 0x14057B7EF767814F
"""Odd numbers with bits all over, which make factors out of places."""


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return the checksum of a tensor's bits and length, int64 [] on its device.

    Args:
        tensor: of any dtype; a tensor that is not contiguous is copied first.
    """
    bytes_n = tensor.detach().contiguous().view(-1).view(torch.uint8)
    length = len(bytes_n)
    whole = length // _WORD * _WORD
    if bytes_n.storage_offset() % _WORD:
        bytes_n = bytes_n.clone()
    words = bytes_n[:whole].view(torch.int32)
    rows = len(words) // _COLUMNS
    found = _rest(words[rows * _COLUMNS :])
    if rows:
        found = found + _table(words[: rows * _COLUMNS].view(rows, _COLUMNS))
    if length > whole:
        last = torch.zeros(_WORD, dtype=torch.uint8, device=tensor.device)
        last[: length - whole] = bytes_n[whole:]
        found = found + last.view(torch.int32).sum(dtype=torch.int64)
    return found + torch.tensor(length, device=tensor.device) * _OF_LENGTH


def _table(words_rc: Tensor) -> Tensor:
    """Return the weighted sum of full rows of words, int32 [rows, columns]."""
    rows, columns = words_rc.shape
    a_r = _mixed(torch.arange(rows, device=words_rc.device) * _OF_ROWS) | 1
    b_c = _mixed(torch.arange(columns, device=words_rc.device) * _OF_COLUMNS) * 2
    found = torch.zeros((), dtype=torch.int64, device=words_rc.device)
    at_once = _ROWS_AT_ONCE.get(words_rc.device.type, _ROWS_AT_ONCE["cuda"])
    for part_rc, of_part in zip(words_rc.split(at_once), a_r.split(at_once), strict=True):
        wide_rc = part_rc.long()
        found = found + (wide_rc.sum(1) * of_part).sum() + (wide_rc.sum(0) * b_c).sum()
    return found


def _rest(words: Tensor) -> Tensor:
    """Return the weighted sum of the words after the last full row."""
    factors = _mixed(torch.arange(len(words), device=words.device) * _OF_REST) | 1
    return (words * factors).sum()


def _mixed(numbers: Tensor) -> Tensor:
    """Return numbers that are no multiples of one number, so that sums of many rarely vanish."""
    return (numbers ^ (numbers >> 32)) * _OF_LENGTH
