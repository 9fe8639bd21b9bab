"""Measured costs of a job tell what the job costs with another treatment of the vocabulary."""

from typing import Any

import pytest

from megatron.schedules.passes import PassKind
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.other_treatment import (
    on_the_ends,
    output_layer_time,
    spread_over_ranks,
)
from megatron.simulator.costs.stage_costs import StageCosts

STAGES = [(0, 0), (1, 0)]
BACKWARD_IN_ONE: dict[PassKind, float] = {"F": 1.0, "B": 2.0}
SPLIT_BACKWARD: dict[PassKind, float] = {"F": 1.0, "B": 1.0, "W": 1.0}


def split(layer: dict[PassKind, float], treatment: str, **passes: Any) -> StageCosts:
    """A job of two ranks that has split its vocabulary, two layers a stage."""
    others: Any = {"IF": [0.1, 0.3], "IB": [0.2, 0.4], "U": [5.0, 6.0], **passes}
    comms: Any = {"X": 0.5, "G": 0.5, "C1": 0.7}
    known = TREATMENTS[treatment]
    return StageCosts(STAGES, layer, [{}, {}], others, known, comms)


def whole(layer: dict[PassKind, float], **extra: float) -> StageCosts:
    """A job of two ranks whose last stage has the output layer."""
    last: Any = extra
    return StageCosts(STAGES, layer, [{}, last], {}, TREATMENTS["none"], {"X": 0.5})


@pytest.mark.parametrize(
    ("treatment", "passes"),
    [
        ("vocab-2", {"S": [4.0, 2.0], "T": [1.0, 2.0]}),
        ("vocab-1", {"S": [4.0, 2.0], "T": 1.5}),
        ("naive", {"S": [3.0, 1.0], "E": 1.0, "T": 1.5}),
    ],
)
def test_a_split_layer_is_added_up_on_the_last_stage(
    treatment: str, passes: dict[str, Any]
) -> None:
    """S and T of both ranks are 9 together: 3 for each of the three products, 1 forward."""
    known = split(BACKWARD_IN_ONE, treatment, **passes)
    assert output_layer_time(known) == pytest.approx(9)
    other = on_the_ends(known)
    costs: Any = other.costs([2, 2]).passes
    lookup, scatter = 0.2, 0.3  # means of IF and of IB
    assert costs["F"] == [pytest.approx([2 + lookup]), pytest.approx([2 + 3])]
    assert costs["B"] == [pytest.approx([4 + scatter]), pytest.approx([4 + 6])]
    assert costs.keys() == {"F", "B", "U"}
    assert costs["U"] == [5.0, 6.0]
    assert other.treatment.name == "none"
    assert set(other.comms) == {"X", "G"}


def test_the_weight_gradient_of_the_output_layer_goes_to_w() -> None:
    known = split(SPLIT_BACKWARD, "vocab-2", S=3.0, T=1.5)
    last = on_the_ends(known).extras[-1]
    assert last == pytest.approx({"F": 3, "B": 3, "W": 3})
    again = on_the_ends(known, recompute=True).extras[-1]  # of four products, W has two
    assert again == pytest.approx({"F": 9 / 4, "B": 9 / 4, "W": 9 / 2})


@pytest.mark.parametrize(
    ("treatment", "passes"),
    [("vocab-2", {"S": 3.0, "T": 1.5}), ("vocab-1", {"S": 1.5, "T": 3.0})],
)
def test_a_whole_layer_is_shared_by_all_ranks(treatment: str, passes: dict[str, float]) -> None:
    """The last stage's 9 are 4.5 a rank, in three equal products."""
    known = whole(BACKWARD_IN_ONE, F=3.0, B=6.0)
    other = spread_over_ranks(known, TREATMENTS[treatment])
    costs: Any = other.costs([2, 2]).passes
    assert costs["F"] == [[2.0], [2.0]]
    assert costs["B"] == [[4.0], [4.0]]
    assert {kind: costs[kind] for kind in passes} == pytest.approx(passes)
    assert costs["IF"] == costs["IB"] == 0


def test_there_and_back_is_the_same_job() -> None:
    known = whole(SPLIT_BACKWARD, F=3.0, B=3.0, W=3.0)
    back = on_the_ends(spread_over_ranks(known, TREATMENTS["vocab-2"]))
    assert back.extras[-1] == pytest.approx(known.extras[-1])


def test_a_last_stage_as_fast_as_its_layers_has_told_nothing() -> None:
    with pytest.raises(ValueError, match="takes no longer than its layers"):
        spread_over_ranks(whole(BACKWARD_IN_ONE, F=0.5, B=-0.6), TREATMENTS["vocab-2"])
