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

    @property
    def first_real_row(self) -> int:
        """The first row, or the end of the real vocabulary if the shard is only padding."""
        return min(self.first_row, self.vocab_size)

    @classmethod
    def of(cls, vocab_size: int, padded_size: int, index: int, shards: int) -> "VocabularyShard":
        """Return shard ``index`` of ``shards`` equal ones of the padded vocabulary."""
        assert padded_size % shards == 0, f"{padded_size} rows do not split into {shards} shards"
        rows = padded_size // shards
        return cls(vocab_size, index * rows, rows)


def local_rows(ids: Tensor, first_row: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return the row of every vocabulary id in a shard, and whether it is there at all.

    An id of another shard contributes only zeros. Its row follows from its place among the ids, so
    that these zeros are added to many rows: additions to one row would wait for one another, on
    CUDA one atomic addition at a time.

    Args:
        ids: int64, of any shape.
        first_row: vocabulary id of the shard's first row.
        rows: rows of the shard; if it has none, no row of the result may be used.
    """
    owned = (ids >= first_row) & (ids < first_row + rows)
    spread = torch.arange(ids.numel(), device=ids.device).view_as(ids) % max(rows, 1)
    return torch.where(owned, ids - first_row, spread), owned


def rows_of(weight_vh: Tensor, row: Tensor) -> Tensor:
    """Return ``weight_vh[row]``, [..., h]; on a CPU that indexing takes three times as long."""
    return functional.embedding(row, weight_vh)
