"""The part of a pass that pairs hide follows from its collectives and their axes."""

from megatron.schedules.make_plan import make_plan
from megatron.simulator.costs.count import (
    HOST_WAIT,
    Begin,
    Collective,
    CountedAxis,
    PassCount,
    RankCount,
    Work,
    product,
)
from megatron.simulator.costs.counted_costs import BY_FLOPS, costs_of

TENSOR, EXPERTS, OF_EXPERT = (
    Collective("all_gather", "tensor", 2, 1000),
    Collective("all_gather", "experts", 2, 100),
    Collective("reduce_scatter", "expert_tensor", 2, 10),
)


class ByBytes:
    """A price: a launch takes 1, a collective that is waited for takes its bytes."""

    products_alone = False

    def seconds(self, work: Work) -> float:
        waited = (step.bytes for step in work.steps if isinstance(step, Collective))
        return float(len(list(work.launches)) + sum(waited))

    def message(self, size: float, *, crossing: bool) -> float:
        return 0.0

    def copy(self, size: float) -> float:
        """Return 0: nothing waits on the host."""
        return 0.0

    def crowding(self, axis: CountedAxis, ranks: int) -> float:
        """Return 0: no communication slows a pass."""
        return 0.0


def counted() -> RankCount:
    """F has three such layers and a part without experts; B exchanges on a lane, which hides it."""
    launch = product(2, 3, 4)
    layer, rest = Work((launch, EXPERTS, launch, OF_EXPERT)), Work((launch, TENSOR))
    beside = Work((launch, Begin((EXPERTS,))))
    return RankCount(
        {
            ("F", 0): PassCount.joined([(rest, 1), (layer, 3)]),
            ("B", 0): PassCount.of(beside),
        }
    )


def test_a_pass_waits_for_exchanges_of_tokens_alone() -> None:
    costs = costs_of([counted()], make_plan("1f1b", "none", 1, 1), ByBytes())
    assert costs.passes == {"F": [[1 + 1000 + 3 * 112]], "B": [[1]]}
    assert costs.waits == {"F": [[3 * 110]]}


def test_tokens_travel_as_often_as_a_product_lies_between_their_exchanges() -> None:
    costs = costs_of([counted()], make_plan("1f1b", "none", 1, 1), ByBytes())
    assert costs.journeys == {"F": [[3 * 2]]}
    launch = product(2, 3, 4)
    sizes_first = Work((launch, EXPERTS, HOST_WAIT, OF_EXPERT, launch, EXPERTS))
    count = RankCount(
        {("F", 0): PassCount.of(sizes_first), ("B", 0): PassCount.of(Work((launch,)))}
    )
    costs = costs_of([count], make_plan("1f1b", "none", 1, 1), ByBytes())
    assert costs.journeys == {"F": [[2]]}


def test_by_flops_no_pass_waits() -> None:
    costs = costs_of([counted()], make_plan("1f1b", "none", 1, 1), BY_FLOPS)
    assert costs.waits == {"F": [[0]]}


LAYERS = ("tensor", "context", "context_heads")
"""The axes of --tp-comm-overlap."""


def test_pairs_of_layers_hide_collectives_of_tensor_ranks() -> None:
    plan = make_plan("1f1b", "none", 1, 1)
    costs = costs_of([counted()], plan, ByBytes(), hidden=LAYERS)
    assert costs.waits == {"F": [[1000]]}
    assert costs.journeys == {"F": [[1]]}
    both = costs_of([counted()], plan, ByBytes(), hidden=(*LAYERS, "experts", "expert_tensor"))
    assert both.waits == {"F": [[1000 + 3 * 110]]}
    assert both.journeys == {"F": [[1 + 3 * 2]]}


def test_b_also_switches_at_reductions_that_it_would_hide_itself() -> None:
    launch = product(2, 3, 4)
    reduction = Collective("reduce_scatter", "tensor", 2, 500)
    work = Work((TENSOR, launch, Begin((TENSOR,)), launch, Begin((reduction,)), launch))
    count = RankCount({("F", 0): PassCount.of(Work((launch,))), ("B", 0): PassCount.of(work)})
    costs = costs_of([count], make_plan("1f1b", "none", 1, 1), ByBytes(), hidden=LAYERS)
    assert costs.waits == {"B": [[1000]]}
    assert costs.journeys == {"B": [[2]]}


def test_b_without_sequence_parallelism_lets_another_pass_work_and_waits_for_nothing() -> None:
    """Its all-reduces begin beside products of W; in a pair the other pass has its turn instead."""
    launch = product(2, 3, 4)
    reduction = Collective("all_reduce", "tensor", 2, 500)
    layer = Work((launch, Begin((reduction,)), launch))
    count = RankCount({("F", 0): PassCount.of(layer), ("B", 0): PassCount.joined([(layer, 3)])})
    plan = make_plan("1f1b", "none", 1, 1)
    costs = costs_of([count], plan, ByBytes(), hidden=LAYERS)
    assert costs.waits == {}
    assert costs.journeys == {"F": [[1]], "B": [[3]]}
    assert costs_of([count], plan, ByBytes()).journeys == {}


def test_w_lets_another_pass_work_after_every_product() -> None:
    launch = product(2, 3, 4)
    alone, gathers = Work((launch, launch)), Work((TENSOR, launch, TENSOR, launch))
    for work, waits in ((alone, {"W": [[0]]}), (gathers, {"W": [[3 * 2000]]})):
        count = RankCount(
            {
                ("F", 0): PassCount.of(alone),
                ("B", 0): PassCount.of(alone),
                ("W", 0): PassCount.joined([(work, 3)]),
            }
        )
        plan = make_plan("zb-h1", "none", 1, 1)
        costs = costs_of([count], plan, ByBytes(), hidden=LAYERS)
        assert costs.waits == waits
        assert costs.journeys == {"W": [[3 * 2]]}
