"""Embeddings and their gradients: a search may move IF and IB, but they take memory meanwhile."""

from megatron.schedules.costs import Costs
from megatron.schedules.from_block import EMBEDDINGS
from megatron.schedules.held import peak_held
from megatron.schedules.make_plan import make_plan

RANKS, MICROBATCHES = 24, 96

LARGE = Costs(
    {"F": 57.0, "B": 142.0, "S": 1.1, "T": 0.9, "IF": 0.24, "IB": 0.76},
    {"X": 0.39, "G": 0.39, "C0": 0.84, "C1": 1.26, "CIF": 0.84, "CIB": 0.84},
)
"""Milliseconds of a large model that computes its layers again."""


def test_a_search_without_w_moves_passes_of_the_input_layer_within_bounds() -> None:
    block, searched = (
        make_plan(
            *("interleaved", "vocab-2", RANKS, MICROBATCHES, LARGE), chunks=2, shortened=shortened
        )
        for shortened in (False, True)
    )
    assert searched.rows != block.rows
    for before, after in zip(block.rows, searched.rows, strict=True):
        least, most = peak_held(block, before), peak_held(searched, after)
        assert most.embeddings <= least.embeddings + EMBEDDINGS
        assert most.gradients <= least.gradients + EMBEDDINGS
