"""Rows that are added to the rows of a sum, of every implementation, against float64."""

import pytest
import torch
from kernels.implementations import IMPLEMENTATIONS, Implementation
from torch import Tensor

ROWS, FIRST = 5, 3
EACH_IMPLEMENTATION = pytest.mark.parametrize("tried", IMPLEMENTATIONS, ids=str)

IDS = torch.tensor([7, 3, 0, 3, 99, 4, 7, 2, 8, 3, *[5] * 21, 3])
"""Rows of other shards on either side; one row once, one four times, one often, and one never."""


def added(tried: Implementation, ids_n: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the sum and what it should be."""
    total_vh = tried.statistic(ROWS, width)
    x_nh = tried.activation(len(ids_n), width, seed=1)
    expected = total_vh.double().clone()
    for id_, row in zip(ids_n.tolist(), x_nh.double(), strict=True):
        if FIRST <= id_ < FIRST + ROWS:
            expected[id_ - FIRST] += row
    tried.kernels.add_rows_(total_vh, ids_n.to(tried.device), x_nh, FIRST)
    return total_vh, expected


@EACH_IMPLEMENTATION
@pytest.mark.parametrize("width", [4, 1030])
def test_rows_go_to_the_rows_of_their_ids(tried: Implementation, width: int) -> None:
    found, expected = added(tried, IDS, width)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@EACH_IMPLEMENTATION
@pytest.mark.parametrize("id_", [FIRST - 1, FIRST, FIRST + ROWS - 1, FIRST + ROWS, 0])
def test_one_token_alone(tried: Implementation, id_: int) -> None:
    found, expected = added(tried, torch.tensor([id_]), 4)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
