"""An exact checksum of a tensor's bits, in plain PyTorch operations on any device.

The bytes are read as 64-bit words w, in a table of rows r and columns c. The checksum is

    sum over r, c of (a_r + b_c) w_rc   modulo 2**64, with a_r odd and b_c even.

Integers wrap around, so no order of additions changes the result. Every factor a_r + b_c is odd, so
a change of a single word always changes the checksum; other changes escape with a chance of about
2**-64. The sums over rows and over columns read the memory twice and copy nothing.
"""

from typing import Final

import torch
from torch import Tensor

_COLUMNS: Final = 4096
"""Words of a row: 32 KiB."""

_WORD: Final = 8
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
    words = bytes_n[:whole].view(torch.int64)
    rows = len(words) // _COLUMNS
    found = _rest(words[rows * _COLUMNS :])
    if rows:
        found = found + _table(words[: rows * _COLUMNS].view(rows, _COLUMNS))
    if length > whole:
        last = torch.zeros(_WORD, dtype=torch.uint8, device=tensor.device)
        last[: length - whole] = bytes_n[whole:]
        found = found + last.view(torch.int64).sum()
    return found + torch.tensor(length, device=tensor.device) * _OF_LENGTH


def _table(words_rc: Tensor) -> Tensor:
    """Return the weighted sum of full rows."""
    rows, columns = words_rc.shape
    device = words_rc.device
    a_r = (torch.arange(rows, device=device) * (2 * _OF_ROWS)) | 1
    b_c = (torch.arange(columns, device=device) * _OF_COLUMNS) * 2
    return (words_rc.sum(1) * a_r).sum() + (words_rc.sum(0) * b_c).sum()


def _rest(words: Tensor) -> Tensor:
    """Return the weighted sum of the words after the last full row."""
    factors = (torch.arange(len(words), device=words.device) * _OF_REST) * 2 + 1
    return (words * factors).sum()
