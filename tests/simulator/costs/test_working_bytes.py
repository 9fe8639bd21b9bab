"""What passes work with: by hand for a plain layer, and what makes it more or less.

That it is what is really allocated, ``pretended_gpu/test_pretended_gpu.py`` finds.
"""

from dataclasses import replace

import pytest

from megatron.schedules.make_plan import make_plan
from megatron.simulator.costs.model_bytes import LogitBytes
from megatron.simulator.costs.recomputed import Recomputed
from megatron.simulator.costs.shape import Shape, TensorSplit
from megatron.simulator.costs.working_bytes import PerChunk, working_bytes

SHAPE = Shape(64, 4, 16, 1000, dropout=False)
X, INNER = 2 * 16 * 64, 2 * 16 * 4 * 64
"""Bytes of an activation, and of one within the MLP."""
LOGIT = LogitBytes(held=2, working=0, workspace=X + 100, early_gradient=6)
"""Of an output layer that scales X, works with 100 bytes besides, and leaves A in fp32."""


def of(shape: Shape, schedule: str, treatment: str, kind: str) -> list[float] | PerChunk:
    """Of every rank of two, with three layers each."""
    plan = make_plan(schedule, treatment, 2, 4)
    [found] = [
        sizes for own, sizes in working_bytes(shape, plan, [3, 3], LOGIT).items() if own == kind
    ]
    return found


def test_a_backward_holds_the_gradients_around_the_mlp() -> None:
    assert of(SHAPE, "1f1b", "vocab-2", "B") == [[X + INNER]] * 2
    assert of(SHAPE, "zb-h1", "vocab-2", "B") == [[X + 2 * INNER]] * 2
    gated = replace(SHAPE, gated_mlp=True)
    assert of(gated, "zb-h1", "vocab-2", "B") == [[X + 3 * INNER]] * 2
    narrow = replace(SHAPE, ffn_hidden_size=8)
    assert of(narrow, "1f1b", "vocab-2", "B") == [[2 * X]] * 2
    assert of(replace(narrow, wide_stream=True), "1f1b", "vocab-2", "B") == [[3 * X]] * 2


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_that_share_a_narrow_layer_hold_parts_of_sums(sequence_parallel: bool) -> None:
    split = TensorSplit(2, sequence_parallel)
    shape = replace(SHAPE, ffn_hidden_size=8, tensor=split)
    own = X / split.sequence_parts
    assert of(shape, "1f1b", "vocab-2", "B") == [[own + (2 + sequence_parallel) * X]] * 2
    assert of(shape, "zb-h1", "vocab-2", "W") == [[2 * X * sequence_parallel]] * 2
    assert of(shape, "1f1b", "vocab-2", "F") == [[3 * own + X], [own + X]]


def test_what_is_computed_again_is_there_in_b_alone() -> None:
    again = replace(SHAPE, recomputed=Recomputed(group=1))
    layer = 16 * X
    assert of(again, "1f1b", "vocab-2", "B") == [[layer - X + X + INNER]] * 2
    assert of(again, "zb-h1", "vocab-2", "B") == [[X + 2 * INNER]] * 2
    further = replace(again, depths=1)
    first, last = of(further, "1f1b", "vocab-2", "B")
    assert first == [layer + INNER]
    assert last == [3 * X + layer + X + INNER]


@pytest.mark.parametrize(
    ("treatment", "in_s", "in_t"),
    [
        ("vocab-2", [4 * X // 2 + 100 + X, 4 * X // 2 + 100], [X + 100] * 2),
        ("vocab-1", [100, 100], [X + 100 + 2 * X] * 2),
    ],
)
def test_the_output_layer_holds_sums_in_fp32_where_it_forms_the_gradient(
    treatment: str, in_s: list[int], in_t: list[int]
) -> None:
    """What C1 makes of A is counted apart on the last rank, which keeps it."""
    assert of(SHAPE, "1f1b", treatment, "S") == in_s
    assert of(SHAPE, "1f1b", treatment, "T") == in_t
    assert of(SHAPE, "1f1b", treatment, "IB") == [2 * X] * 2


def test_a_whole_output_layer_works_in_the_passes_of_the_last_stage() -> None:
    first, last = of(SHAPE, "zb-h1", "none", "W")
    assert first == [0]
    assert last == [2 * X + 100]
