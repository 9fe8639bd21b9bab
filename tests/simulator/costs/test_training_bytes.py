"""Bytes of this project's own runs: what a step that may be undone keeps and moves."""

from typing import Any

import pytest

from megatron.schedules.make_plan import make_plan
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.model_bytes import LogitBytes, parameters
from megatron.simulator.costs.shape import Shape
from megatron.simulator.costs.training_bytes import (
    of_ranks,
    optimizer_traffic,
    training_sizes,
)

SHAPE = Shape(64, 4, 16, 1000)
POSITIONS = 16


def sizes_and_traffic(ranks: int, treatment: str, post_validation: bool) -> tuple[Any, float]:
    plan = make_plan("1f1b", treatment, ranks, 4)
    how: dict[str, Any] = {"tied": False, "post_validation": post_validation}
    common = (SHAPE, plan, [2] * ranks, TREATMENTS[treatment])
    sizes = training_sizes(*common, LogitBytes(2, 0), positions=POSITIONS, **how)
    return sizes, max(optimizer_traffic(*common, **how))


@pytest.mark.parametrize("treatment", ["none", "vocab-2"])
def test_all_ranks_but_the_last_keep_a_copy_of_masters_and_moments(treatment: str) -> None:
    """In fp32: 12 bytes a parameter, which the step reads and writes in addition to its own 30."""
    now, moved_now = sizes_and_traffic(3, treatment, post_validation=False)
    later, moved_later = sizes_and_traffic(3, treatment, post_validation=True)
    counts = parameters(SHAPE, ((0, 0), (1, 0), (2, 0)), [2] * 3, TREATMENTS[treatment])
    grown = [b - a for a, b in zip(of_ranks(now.static), of_ranks(later.static), strict=True)]
    first = counts[0] + POSITIONS * SHAPE.hidden_size
    assert grown == pytest.approx([12 * first, 12 * counts[1], 0])
    assert later.activation == now.activation
    assert moved_now == pytest.approx(30 * max(counts))
    assert moved_later == pytest.approx(54 * max(counts[:-1]))


def test_a_single_rank_never_undoes_a_step() -> None:
    sizes = [sizes_and_traffic(1, "none", later) for later in (False, True)]
    assert sizes[0] == sizes[1]


def test_word_embeddings_that_are_scaled_or_normalised_wait_for_their_gradient() -> None:
    plan = make_plan("1f1b", "vocab-2", 2, 4)
    how: dict[str, Any] = {"tied": False, "post_validation": False, "positions": 0}
    common = (SHAPE, plan, [2, 2], TREATMENTS["vocab-2"], LogitBytes(2, 0))
    before: Any = training_sizes(*common, **how).activation
    after: Any = training_sizes(*common, **how, changes_words=True).activation
    grown = [b[0] - a[0] for a, b in zip(before, after, strict=True)]  # of the one chunk
    assert grown == [2 * SHAPE.elements, 0]
