"""Which ranks have a copy of the embedding, listed by hand."""

from dataclasses import replace

import pytest

from megatron.runtime.embedding_copies import ranks_with_copies
from megatron.schedules.make_plan import make_plan


@pytest.mark.parametrize(
    ("schedule", "ahead", "untied", "tied"),
    [
        ("1f1b", None, (0,), (0, 3)),
        ("1f1b", 3, (0, 3), (0, 3)),
        ("1f1b", 2, (0, 2), (0, 2, 3)),
        ("1f1b", 0, (0,), (0, 3)),
        # stages 0 to 7 are on ranks 0, 1, 2, 3, 3, 2, 1, 0
        ("zb-v", None, (0,), (0,)),
        ("zb-v", 7, (0,), (0,)),
        ("zb-v", 5, (0, 2), (0, 2)),
    ],
)
def test_the_first_stage_and_those_that_read_the_matrix_too(
    schedule: str, ahead: int | None, untied: tuple[int, ...], tied: tuple[int, ...]
) -> None:
    plan = replace(make_plan(schedule, "none", 4, 4), ahead_stage=ahead)
    assert ranks_with_copies(plan, tied=False) == untied
    assert ranks_with_copies(plan, tied=True) == tied


@pytest.mark.parametrize("ahead", [None, 2, 3])
def test_shards_are_no_copies(ahead: int | None) -> None:
    plan = replace(make_plan("1f1b", "vocab-2", 4, 4), ahead_stage=ahead)
    assert ranks_with_copies(plan, tied=True) == ranks_with_copies(plan, tied=False) == (0,)
