"""A microbatch leaves its loss until the iteration ends; sums of layers' losses are held once."""

from dataclasses import replace

import pytest
from planning.count.counting import LLAMA, MODEL, counted, run_of
from planning.count.test_assumed_routes import MIXTURE

from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.planning.count.recorder import GRANULE
from megatron.simulator.costs.count import RankCount


def left(count: RankCount) -> float:
    """Return the bytes that a microbatch leaves when all its passes are through."""
    kinds = count.passes, count.begun, count.ended
    return sum(own.left for kind in kinds for own in kind.values())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("treatment", ["none", "naive", "vocab-1", "vocab-2"])
def test_the_last_stage_keeps_the_loss_of_every_microbatch(treatment: str, schedule: str) -> None:
    first, last = counted(run_of(MODEL, treatment, 2), [4, 4], schedule)
    assert (left(first), left(last)) == (0, GRANULE)


def test_rounds_of_weights_in_8_bits_change_no_loss() -> None:
    """The weights are made in a round of their own, which has losses too."""
    model = replace(LLAMA, num_layers=2)
    run = run_of(model, "vocab-2", 2, eight_bits=EightBitSettings("hybrid"))
    first, last = counted(run, [1, 1])
    assert (left(first), left(last)) == (0, GRANULE)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("treatment", ["none", "vocab-2"])
def test_sums_over_microbatches_are_held_once(treatment: str, layers: int) -> None:
    """The losses and the loads of a mixture's layer are sums over microbatches, of a granule each.

    Layers before the last one of a chunk are counted apart.
    """
    dense = replace(LLAMA, num_layers=2 * layers)
    mixture = MIXTURE.replaced(num_layers=2 * layers, moe_aux_loss_coeff=(0.01,))
    found, plain = (
        counted(run_of(model, treatment, 2), [layers] * 2) for model in (mixture, dense)
    )
    more = [own.held - other.held for own, other in zip(found, plain, strict=True)]
    assert more == [2 * GRANULE * layers] * 2
    if layers == 1:
        assert [left(count) for count in found] == [0, GRANULE]
