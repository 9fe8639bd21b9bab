"""GPipe with vocabulary passes: nothing but the pipeline's ends idles, whatever p and m are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.schedules.costs import Costs
from megatron.schedules.make_plan import make_plan
from megatron.schedules.timing import earliest, longest_span

F, B, S, T = 1.0, 2.0, 0.25, 0.25
COSTS = Costs({"F": F, "B": B, "S": S, "E": 0.0, "T": T, "IF": 0.0, "IB": 0.0})


@pytest.mark.parametrize("vocabulary", ["vocab-1", "vocab-2", "interlaced"])
@given(p=st.integers(1, 12), m=st.integers(1, 30))
def test_the_block_idles_only_while_the_pipeline_fills_and_drains(
    vocabulary: str, p: int, m: int
) -> None:
    plan = make_plan("gpipe", vocabulary, p, m, COSTS, shortened=False)
    span = longest_span(earliest(plan, COSTS).working)
    assert span == pytest.approx(m * (F + B + S + T) + (p - 1) * (F + B))
