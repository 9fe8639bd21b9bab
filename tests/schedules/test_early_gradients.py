"""How many of the output layer's early input gradients a rank holds at a time."""

import pytest
from harness.marks import full

from megatron.schedules.catalogue import SCHEDULES
from megatron.schedules.lower import Start, lower
from megatron.schedules.make_plan import make_plan

QUICK = "1f1b", "interleaved", "zb-v", "v-half"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("schedule", [name if name in QUICK else full(name) for name in SCHEDULES])
def test_no_more_than_two_input_gradients_are_early(schedule: str) -> None:
    """S waits for C0, and of all collectives one runs after another.

    So what S has left is gone once its C1 comes before another microbatch's C0.
    """
    for ranks, microbatches in [(2, 16), (4, 4), (6, 9)]:
        for row in lower(make_plan(schedule, "vocab-2", ranks, microbatches)).rows:
            early = 0
            for instruction in row:
                if isinstance(instruction, Start):
                    early += {"C0": 1, "C1": -1}.get(instruction.comm.kind, 0)
                    assert early <= 2
