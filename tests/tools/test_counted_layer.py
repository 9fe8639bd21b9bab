"""counted_layer.py: FLOPs, kept bytes and communications that the papers say, from the count."""

import pytest

from megatron.simulator.costs.count import Begin, Collective
from tools.predictions.counted_layer import Recomputation, Shape

LAYOUTS = [(1, False), (2, False), (2, True), (8, True)]


@pytest.mark.parametrize("again", ["none", "selective", "full"])
@pytest.mark.parametrize(("tensor", "parallel"), LAYOUTS)
def test_products_are_those_of_the_papers(
    tensor: int, parallel: bool, again: Recomputation
) -> None:
    """24 bsh^2 + 4 bs^2h of a layer, and twice that in its backward (2104.04473)."""
    h, s, b = 1024, 512, 2
    shape = Shape(
        h,
        8,
        s,
        51_200,
        b,
        dropout=True,
        tensor=tensor,
        sequence_parallel=parallel,
        recomputation=again,
    )
    linear, attention = 24 * b * s * h**2 // tensor, 4 * b * s**2 * h // tensor
    passes = shape.passes()
    assert passes["F"].flops == linear + attention
    repeated = attention if again == "selective" else 0
    assert passes["B"].flops == 2 * (linear + attention) + repeated
    split = shape.passes(split=True)
    assert split["B"].flops + split["W"].flops == passes["B"].flops
    assert ("R" in passes) == (again == "full")
    if again == "full":  # Megatron-LM's checkpoints form the output too
        assert passes["R"].steps == passes["F"].steps


@pytest.mark.parametrize(("again", "activations"), [("none", 17), ("selective", 17), ("full", 1)])
def test_a_layer_keeps_what_the_papers_table_says(again: Recomputation, activations: int) -> None:
    """34 sbh bytes (table 2 of 2205.05198, with flash attention), and a few numbers of a token."""
    shape = Shape(2048, 16, 1024, 51_200, dropout=True, recomputation=again)
    passes = shape.passes()
    assert shape.kept == pytest.approx(activations * shape.activation, rel=0.01)
    assert sum(work.left for work in passes.values()) == 0


@pytest.mark.parametrize(("tensor", "parallel"), LAYOUTS)
def test_ranks_of_a_layer_sum_activations_twice(tensor: int, parallel: bool) -> None:
    shape = Shape(1024, 8, 512, 51_200, tensor=tensor, sequence_parallel=parallel)
    steps = shape.passes()["F"].steps
    forward = [step for step in steps if isinstance(step, Collective)]
    kinds = ["all_gather", "reduce_scatter"] if parallel else ["all_reduce"]
    assert [each.kind for each in forward] == kinds * (2 if tensor > 1 else 0)
    assert {each.bytes for each in forward} <= {shape.activation}
    begun = sum(isinstance(step, Begin) for step in shape.passes()["B"].steps)
    assert begun == len(forward)  # beside products of the backward


def test_parameters_of_a_layer() -> None:
    """12 h^2 and 13 h (2104.04473, equation 2)."""
    assert Shape(1024, 8, 512, 51_200).parameters == 12 * 1024**2 + 13 * 1024
