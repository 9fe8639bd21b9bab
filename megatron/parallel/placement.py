"""Which ranks are in one machine, and what that costs: plain arithmetic.

Launchers number the ranks machine by machine, so machine k has the ranks from k times the ranks of
a machine on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise

from megatron.parallel.grid import ORDERS, Grid, Order


@dataclass(frozen=True)
class Placement:
    """How the ranks of a job lie in machines.

    Attributes:
        machines: how many there are.
        crossing: pairs of pipeline ranks, ascending, that are in different machines in some
            pipeline of the job.
        hops: of the hops from a pipeline rank to the next, those that leave a machine; the most of
            any pipeline.
        tensor: whether ranks that share a layer are in different machines.
        data: whether replicas are.
    """

    machines: int
    crossing: frozenset[tuple[int, int]]
    hops: int
    tensor: bool
    data: bool


@lru_cache
def placement(grid: Grid, ranks_per_machine: int) -> Placement:
    """Return how the ranks of ``grid`` lie in machines of so many ranks each."""

    def machine(rank: int) -> int:
        return rank // ranks_per_machine

    def spreads(axis: "tuple[tuple[int, ...], ...]") -> bool:
        return any(len(set(map(machine, ranks))) > 1 for ranks in axis)

    def crossing() -> Iterator[tuple[int, int]]:
        for ranks in grid.groups("pipeline"):
            for (a, one), (b, other) in combinations(enumerate(ranks), 2):
                if machine(one) != machine(other):
                    yield a, b

    hops = (
        sum(machine(a) != machine(b) for a, b in pairwise(ranks))
        for ranks in grid.groups("pipeline")
    )
    return Placement(
        machines=machine(grid.world_size - 1) + 1,
        crossing=frozenset(crossing()),
        hops=max(hops),
        tensor=spreads(grid.groups("tensor")),
        data=spreads(grid.groups("data")),
    )


def fewest_hops(
    tensor_size: int, data_size: int, pipeline_size: int, ranks_per_machine: int
) -> Order:
    """Return the order of ranks in which the fewest hops of a pipeline leave a machine.

    Every microbatch takes all hops, and the vocabulary's collectives go along the pipeline too;
    replicas exchange their gradients once in an iteration, beside the passes. Of orders that are
    alike the result is Megatron's.
    """

    def hops(order: Order) -> int:
        return placement(Grid(tensor_size, data_size, pipeline_size, order), ranks_per_machine).hops

    return min(ORDERS, key=hops)
