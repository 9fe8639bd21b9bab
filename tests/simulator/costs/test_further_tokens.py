"""What multi-token prediction costs: where its work is, and that none is counted twice or left out.

The reference is the count of FLOPs of an iteration, which is compared with PyTorch's own.
"""

from dataclasses import replace

import pytest

from megatron.schedules.costs import Time
from megatron.schedules.passes import CHUNKED_KINDS
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.activation_bytes import depth_activation_bytes
from megatron.simulator.costs.device import FUSED, NOTIONAL
from megatron.simulator.costs.from_model import ModelTimes
from megatron.simulator.costs.model_bytes import model_sizes, parameters
from megatron.simulator.costs.recomputed import Recomputed
from megatron.simulator.costs.shape import Shape, TensorSplit, iteration_flops
from megatron.simulator.costs.stage_costs import notional_costs

SHAPE = Shape(64, 4, 32, 1000, micro_batch_size=2, windows=(None, 7, None, None, 5))
STAGES = [(0, 0), (1, 0), (1, 1), (0, 1)]
LAYERS = (2, 0, 2, 1)


def flat(time: Time) -> float:
    return time if isinstance(time, (int, float)) else sum(map(flat, time))


@pytest.mark.parametrize("treatment", ["none", "vocab-1", "vocab-2"])
@pytest.mark.parametrize("depths", [0, 1, 3])
def test_all_passes_together_are_the_flops_of_an_iteration(depths: int, treatment: str) -> None:
    shape, treated = replace(SHAPE, depths=depths), TREATMENTS[treatment]
    passes = notional_costs(shape, STAGES, treated).costs(LAYERS).passes
    found = sum(flat(passes[kind]) for kind in CHUNKED_KINDS if kind in passes)
    if treated.is_sharded:
        found += 2 * sum(flat(passes[kind]) for kind in treated.output_passes)
    else:  # looking embeddings up is no product
        looked_up = ModelTimes(shape, NOTIONAL, FUSED).whole_input()
        found -= (2 if depths else 1) * sum(looked_up.values())
    assert found == pytest.approx(iteration_flops(shape, 5, 1), rel=1e-12)


@pytest.mark.parametrize("treatment", ["none", "vocab-2"])
def test_the_layers_are_on_the_last_stage_and_the_output_layer_grows(treatment: str) -> None:
    plain, further = (
        notional_costs(replace(SHAPE, depths=depths), STAGES, TREATMENTS[treatment])
        .costs(LAYERS)
        .passes
        for depths in (0, 2)
    )
    for kind in plain.keys() & set(CHUNKED_KINDS):
        before, after = plain[kind], further[kind]
        assert isinstance(before, list)
        assert isinstance(after, list)
        grown = [
            [more > less for less, more in zip(*rows, strict=True)]
            for rows in zip(before, after, strict=True)
        ]
        assert grown == [[False, True], [False, False]]
    if treatment == "vocab-2":
        for kind in ("S", "T"):
            assert flat(further[kind]) == pytest.approx(3 * flat(plain[kind]))


def test_whole_layers_that_are_computed_again_include_those_of_depths() -> None:
    again = replace(SHAPE, depths=2, recomputed=Recomputed(group=1))
    limited = replace(again, recomputed=Recomputed(group=1, most=1))
    kept = replace(SHAPE, depths=2)

    def backward_of_last(shape: Shape) -> float:
        return ModelTimes(shape, NOTIONAL, FUSED).further_tokens(TREATMENTS["vocab-2"])["B"]

    more = 2 * (SHAPE.forward_flops + SHAPE.joining_flops - SHAPE.hidden_flops(5))
    assert backward_of_last(again) - backward_of_last(kept) == pytest.approx(more)
    assert backward_of_last(limited) == backward_of_last(kept)
    assert depth_activation_bytes(again) < depth_activation_bytes(kept) / 10


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("treatment", "copies"), [("none", 1), ("vocab-2", 0)])
def test_the_last_stage_has_the_parameters(treatment: str, copies: int, tied: bool) -> None:
    """And a copy of the embedding, where it has none of its own yet."""
    stages, treated = [(0, 0), (1, 0)], TREATMENTS[treatment]
    norms = replace(SHAPE, depth_vector_parameters=6 * 64)
    first, last = (
        after - before
        for before, after in zip(
            *(
                parameters(replace(norms, depths=depths), stages, (3, 2), treated, tied=tied)
                for depths in (0, 2)
            ),
            strict=True,
        )
    )
    depth = SHAPE.layer_parameters + 2 * 64**2 + 6 * 64
    assert first == 0
    assert last == 2 * depth + (0 if tied else copies * 64 * 1000)


def test_tensor_ranks_share_the_product_that_joins() -> None:
    shared = replace(SHAPE, tensor=TensorSplit(4))
    assert 4 * shared.joining_parameters == SHAPE.joining_parameters == 2 * 64**2


def test_the_last_rank_holds_embeddings_from_their_lookup_on() -> None:
    sizes = model_sizes(replace(SHAPE, depths=1), STAGES, LAYERS, TREATMENTS["vocab-2"])
    assert sizes.ahead == [2 * 64 * 64, 0.0]
    assert model_sizes(SHAPE, STAGES, LAYERS, TREATMENTS["vocab-2"]).ahead == [0.0, 0.0]
