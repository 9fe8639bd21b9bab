"""tools/predictions/calibrate.py: the constants in the code are as good as its choice."""

from dataclasses import replace
from math import sqrt
from pathlib import Path

import pytest

from megatron.simulator.costs.gpus import GPUS
from tools.predictions.calibrate import GRID, Data, descend, read_data

DATA = read_data(Path("docs/reference"))
RATES = GPUS["A100"].rates
PASSES = replace(DATA, runs=())


def test_rows_kept_out_are_kept_out() -> None:
    assert [run.number for run in DATA.runs] == [12, 13, 15, 16, 18, 19, 22, 24, 25]
    assert {run.method for run in DATA.passes} == {"baseline"}
    assert len(list(PASSES.errors(RATES))) == 4 * 2 + 2 * 2


def test_constants_of_the_code_are_among_the_candidates() -> None:
    for name, values in GRID.items():
        assert getattr(RATES, name) in values


def test_a_descent_ends_where_no_constant_alone_does_better() -> None:
    turns = list(descend(PASSES, RATES))
    sums = [min(sums.values()) for _, sums, _ in turns]
    assert sums == sorted(sums, reverse=True)
    final = turns[-1][-1]
    assert {name for name, *_ in turns[-len(GRID) :]} == set(GRID)
    assert PASSES.squares(final) == sums[-1] <= PASSES.squares(RATES)


@pytest.mark.full
def test_constants_of_the_code_are_as_good_as_the_choice() -> None:
    """The minimum is flat: within a tenth of a point of the root of the mean square."""

    def root(data: Data, sums: float) -> float:
        return sqrt(sums / len(list(data.errors(RATES))))

    *_, (_, sums, _) = descend(DATA, RATES)
    assert root(DATA, DATA.squares(RATES)) - root(DATA, min(sums.values())) < 0.001
