"""Rows of a vocabulary shard by the ids of tokens."""

import torch
from torch import Tensor
from torch.nn import functional


def local_rows(ids: Tensor, first_row: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return the row of every vocabulary id in a shard, and whether the shard has that id.

    An id of another shard gets some row, to which only zeros are added. That row follows from the
    id's place among the ids, so that these zeros go to many rows: CUDA adds to one row by one
    atomic addition at a time.

    Args:
        ids: int64, of any shape.
        first_row: vocabulary id of the shard's first row.
        rows: number of rows of the shard; if it is 0, no row of the result may be used.
    """
    owned = (ids >= first_row) & (ids < first_row + rows)
    spread = torch.arange(ids.numel(), device=ids.device).view_as(ids) % max(rows, 1)
    return torch.where(owned, ids - first_row, spread), owned


def rows_of(weight_vh: Tensor, row: Tensor) -> Tensor:
    """Return ``weight_vh[row]``, [..., h]; on a CPU that indexing takes three times as long."""
    return functional.embedding(row, weight_vh)
