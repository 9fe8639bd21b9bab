"""What a pass does in a pair follows from its counted steps."""

from collections.abc import Sequence

import pytest

from megatron.schedules.pair_steps import PAUSES, SWITCHES, PairStep, Sends, Waits, Works
from megatron.schedules.passes import PassKind
from megatron.simulator.costs.count import (
    AWAIT,
    PAUSE,
    Await,
    Begin,
    Collective,
    CountedAxis,
    Launch,
    PassCount,
    RankCount,
    Step,
    Work,
    product,
)
from megatron.simulator.costs.turns import turns_of

PRODUCT = product(2, 3, 4)
NORM = Launch("norm", 10)
GATHER, SUM, EXPERTS = (
    Collective("all_gather", "tensor", 2, 1000),
    Collective("reduce_scatter", "tensor", 2, 500),
    Collective("all_to_all", "experts", 2, 100),
)


class Simple:
    """A launch takes 1, and a collective its bytes; one of tensor ranks slows passes by a tenth."""

    def seconds(self, work: Work) -> float:
        own = (step.bytes for step in work.steps if isinstance(step, Collective))
        return float(len(list(work.launches)) + sum(own))

    def crowding(self, axis: CountedAxis, ranks: int) -> float:
        return 0.1 if axis == "tensor" else 0.0


def steps_of(
    steps: Sequence[Step], kind: PassKind = "F", hidden: Sequence[str] = ("tensor",), times: int = 1
) -> tuple[PairStep, ...]:
    count = RankCount({(kind, 0): PassCount.joined([(Work(tuple(steps)), times)])})
    [[finds]] = turns_of([count], [kind], 1, Simple(), hidden)[kind]
    found = finds()
    assert finds() is found
    return found.steps


GATHERS, SUMS = Sends(1000.0, "tensor", 0.1), Sends(500.0, "tensor", 0.1)


def test_f_switches_at_collectives_and_pauses() -> None:
    found = steps_of((GATHER, PRODUCT, PAUSE, PRODUCT, NORM, SUM, NORM), times=2)
    layer = (SWITCHES, Works(1.0), PAUSES, Works(2.0))
    assert [step for step in found if not isinstance(step, Waits)] == [
        *(GATHERS, *layer, SUMS, SWITCHES, Works(1.0)),
        *(GATHERS, *layer, SUMS, SWITCHES, Works(1.0)),
    ]
    assert [step.number for step in found if isinstance(step, Waits)] == [0, 1, 2, 3]


def test_b_works_on_during_a_reduction_and_gathers_without_a_switch() -> None:
    """As alone; but when the reduction has begun, the other pass has its turn."""
    steps = Begin((GATHER,)), PRODUCT, AWAIT, Begin((SUM,)), PRODUCT, AWAIT, NORM
    assert steps_of(steps, "B") == (
        *(GATHERS, Works(1.0), Waits(0)),
        *(SUMS, SWITCHES, Works(1.0), Waits(1), Works(1.0)),
    )


def test_w_switches_after_each_product_while_it_gathers_for_later_ones() -> None:
    begin: Step = Begin((GATHER,))
    steps: list[Step] = [begin, begin, Await(1), PRODUCT, Await(0), PRODUCT]
    assert steps_of(steps, "W", times=2) == (
        *(GATHERS, GATHERS, SWITCHES),
        *(Waits(0), GATHERS, Works(1.0), SWITCHES, Waits(1), GATHERS, Works(1.0), SWITCHES),
        *(Waits(2), Works(1.0), SWITCHES, Waits(3), Works(1.0)),
    )
    assert steps_of([PRODUCT, NORM, PRODUCT], "W") == (Works(1.0), SWITCHES, Works(2.0))


@pytest.mark.parametrize("hidden", [("experts",), ("tensor", "experts")])
def test_a_pass_waits_alone_where_pairs_do_not_switch(hidden: Sequence[str]) -> None:
    found = steps_of((GATHER, PAUSE, EXPERTS), hidden=hidden)
    exchange = Sends(100.0, "experts"), SWITCHES
    if hidden == ("experts",):
        assert found == (Works(1000.0), *exchange, Waits(0))
    else:
        assert found == (GATHERS, SWITCHES, Waits(0), PAUSES, *exchange, Waits(1))
