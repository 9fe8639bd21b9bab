"""DualPipeV beside its published figures, and beside PyTorch's own DualPipeV.

Published (github.com/deepseek-ai/DualPipe, README.md; PP is the number of stages, 2p): the bubble
is (PP / 2 - 1) (F&B + B - 3 W), where B is a whole backward and F&B is the time of a pair; a rank
holds the activations of PP + 1 chunks. PyTorch has the published order, and asks for at least 2p
microbatches, as its authors do. Here any number will do.
"""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Final

import pytest
from harness.marks import full
from harness.properties import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from megatron.schedules.costs import Costs
from megatron.schedules.held import in_flight
from megatron.schedules.make_plan import make_plan
from megatron.schedules.plan import Plan
from megatron.schedules.timing import earliest
from megatron.schedules.torch_csv import from_torch_csv

EQUAL: Final = Costs({"F": 1.0, "B": 1.0, "W": 1.0})
UNEQUAL: Final = Costs({"F": 18.0, "B": 20.0, "W": 14.0})


def dualpipe_v_of_pytorch(p: int, m: int) -> Plan:
    """Return PyTorch's order, which is that of the authors' own ``dualpipev.py``."""
    asked = SimpleNamespace(pp_group_size=p, _n_microbatches=m)
    order: Any = schedules.ScheduleDualPipeV._calculate_single_rank_operations
    rows = (",".join(map(str, order(asked, rank))) for rank in range(p))
    return from_torch_csv("".join(f"{row}\n" for row in rows))


def neighbours(plan: Plan) -> int:
    """Count the F that stand right before a B of another microbatch."""
    return sum(
        one.kind == "F" and other.kind == "B" and one.microbatch != other.microbatch
        for row in plan.rows
        for one, other in pairwise(row)
    )


@settings(max_examples=examples(30))
@given(st.integers(1, 24), st.integers(1, 60))
def test_a_rank_holds_one_chunk_more_than_there_are_stages(p: int, m: int) -> None:
    held = max(in_flight(make_plan("dualpipe-v", "none", p, m, shortened=False)))
    assert held <= min(m, (2 * p + 1) / 2)
    if m > 2 * p:
        assert held == (2 * p + 1) / 2


@settings(max_examples=examples(30))
@given(st.integers(2, 12), st.integers(0, 12))
def test_the_block_has_the_steady_state_of_the_published_order(p: int, more: int) -> None:
    """From the first B of chunk 0 to the last F, a rank alternates F&B of its two chunks."""
    m = 2 * p + more
    mine, theirs = (
        make_plan("dualpipe-v", "none", p, m, shortened=False),
        dualpipe_v_of_pytorch(p, m),
    )
    assert mine.stages == theirs.stages
    for own, row in zip(mine.rows, theirs.rows, strict=True):
        first = min(index for index, item in enumerate(row) if (item.kind, item.chunk) == ("B", 0))
        last = max(index for index, item in enumerate(row) if item.kind == "F")
        steady = row[first : last + 1]
        at = own.index(steady[0])
        assert own[at : at + len(steady)] == steady


@pytest.mark.parametrize("costs", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 7), (4, 8), full(8, 20)])
def test_its_plan_is_no_longer_than_pytorchs_and_keeps_its_neighbours(
    p: int, m: int, costs: Costs
) -> None:
    mine, theirs = make_plan("dualpipe-v", "none", p, m, costs), dualpipe_v_of_pytorch(p, m)
    theirs = replace(theirs, pairs=frozenset())
    assert earliest(mine, costs).end <= earliest(theirs, costs).end + 1e-9
    assert max(in_flight(mine)) <= max(in_flight(theirs)) == (2 * p + 1) / 2
    if costs is EQUAL:
        assert neighbours(mine) >= neighbours(theirs)
