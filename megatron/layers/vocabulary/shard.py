"""Which rows of the vocabulary a rank holds."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class VocabularyShard:
    """A contiguous part of the padded vocabulary.

    Attributes:
        vocab_size: real entries V of the whole vocabulary.
        first_row: vocabulary id of the shard's first row.
        rows: rows of the shard, padding included; the same on every rank.
    """

    vocab_size: int
    first_row: int
    rows: int

    @property
    def real_rows(self) -> int:
        """Rows that stand for a real entry; the rest, at the end, is padding."""
        return max(0, min(self.rows, self.vocab_size - self.first_row))

    @classmethod
    def of(cls, vocab_size: int, padded_size: int, index: int, shards: int) -> "VocabularyShard":
        """Return shard ``index`` of ``shards`` equal ones of the padded vocabulary."""
        assert padded_size % shards == 0, f"{padded_size} rows do not split into {shards} shards"
        rows = padded_size // shards
        return cls(vocab_size, index * rows, rows)


def local_rows(ids: Tensor, first_row: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return the row of every vocabulary id in a shard, and whether it is there at all.

    An id of another shard gets a row by its place among the ids, for the zeros that it stands for
    to be added to: in one row they would wait for one another, on CUDA one atomic addition at a
    time.

    Args:
        ids: int64, of any shape.
        first_row: vocabulary id of the shard's first row.
        rows: of the shard; where there are none, no row of the result may be used.
    """
    owned = (ids >= first_row) & (ids < first_row + rows)
    spread = torch.arange(ids.numel(), device=ids.device).view_as(ids) % max(rows, 1)
    return torch.where(owned, ids - first_row, spread), owned


def rows_of(weight_vh: Tensor, row: Tensor) -> Tensor:
    """Return [..., h]: ``weight_vh[row]``, which takes PyTorch three times as long on a CPU."""
    return functional.embedding(row, weight_vh)
