"""Which ranks are in one machine, and which messages leave it: plain arithmetic.

Launchers number the ranks machine by machine, so the ranks of machine k begin with k times the
number of ranks of a machine.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations, pairwise
from typing import Final

from megatron.parallel.grid import ORDERS, AxisName, Grid, Order

_CACHED: Final = 256
"""Axes whose machines are kept: the links of a run ask for each axis several times."""


@dataclass(frozen=True)
class Placement:
    """How the ranks of a job lie in machines.

    Attributes:
        grid: all ranks.
        ranks_per_machine: ranks of a machine; the last machine may have fewer.
    """

    grid: Grid
    ranks_per_machine: int

    @property
    def machines(self) -> int:
        """The number of machines."""
        return -(-self.grid.world_size // self.ranks_per_machine)

    @cached_property
    def hops(self) -> int:
        """Hops from a pipeline rank to the next that leave a machine; the most of any pipeline."""
        return max(sum(a != b for a, b in pairwise(where)) for where in self._spread("pipeline"))

    @cached_property
    def crossing(self) -> frozenset[tuple[int, int]]:
        """Pairs of pipeline ranks, ascending, that are in different machines in some pipeline."""
        return frozenset(
            (a, b)
            for where in self._spread("pipeline")
            for a, b in combinations(range(len(where)), 2)
            if where[a] != where[b]
        )

    @cached_property
    def tensor(self) -> bool:
        """Whether ranks that share a layer are in different machines."""
        return any(len(set(where)) > 1 for where in self._spread("tensor"))

    @cached_property
    def context(self) -> bool:
        """Whether ranks that share a sequence are in different machines."""
        return any(len(set(where)) > 1 for where in self._spread("context"))

    @cached_property
    def data(self) -> bool:
        """Whether ranks with the same parameters are in different machines."""
        return any(len(set(where)) > 1 for where in self._spread("data"))

    def together(self, axis: AxisName) -> int:
        """Return the fewest ranks that a group of an axis has in one of its machines.

        So a group has at least this many network adapters in each of its machines.
        """
        return min(min(Counter(where).values()) for where in self._spread(axis))

    def _spread(self, axis: AxisName) -> frozenset[tuple[int, ...]]:
        """Return the machines of every group's ranks on an axis, counted from the group's first."""
        return _spread(self.grid, self.ranks_per_machine, axis)


@lru_cache(_CACHED)
def _spread(grid: Grid, ranks_per_machine: int, axis: AxisName) -> frozenset[tuple[int, ...]]:
    """Return the machines of every group's ranks, as ``Placement._spread``."""
    found = set()
    for ranks in grid.groups(axis):
        where = [rank // ranks_per_machine for rank in ranks]
        found.add(tuple(machine - where[0] for machine in where))
    return frozenset(found)


def fewest_hops(grid: Grid, ranks_per_machine: int) -> Order:
    """Return the order of ranks in which the fewest hops of a pipeline leave a machine.

    Every microbatch takes all hops, and the vocabulary's collectives go along the pipeline too;
    replicas exchange their gradients once in an iteration, while passes run. If both orders have
    equally many, the result is Megatron's default.

    Args:
        grid: sizes of all axes.
        ranks_per_machine: ranks of a machine.
    """

    def hops(order: Order) -> int:
        return Placement(replace(grid, order=order), ranks_per_machine).hops

    return min(ORDERS, key=hops)
