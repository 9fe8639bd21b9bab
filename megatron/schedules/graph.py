"""One microbatch's passes and communications, numbered, with their needs and durations.

Dependencies never cross microbatches, and costs do not depend on the microbatch. So ``needs`` is
called for microbatch 0 only. The passes of each of its slices have numbers of their own. Code that
walks a plan of many microbatches works with whole numbers: pass ``n`` of microbatch ``i`` is
``n * m + i``. Communications have their own numbers, made by the same formula.
"""

from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from itertools import product

from megatron.schedules.costs import Costs
from megatron.schedules.needs import Comm, needs, participants, sources
from megatron.schedules.pair_time import joined_time, order_of_turns
from megatron.schedules.passes import DESCENDING_KINDS, Pass, PassKind
from megatron.schedules.plan import Plan, passes_of
from megatron.schedules.turn_order import TurnOrder


class Graph:
    """The numbered passes and communications of a plan; the order of its rows does not matter.

    Attributes:
        microbatches: microbatches m.
        ranks: for every pass, its rank.
        passes: for every pass number, the pass of microbatch 0, which gives its kind, chunk and
            slice.
        times: for every pass, its duration.
        waits: for every pass, the part of its duration in which it waits for collectives.
        own_needs: for every pass, the passes of the same rank that it needs.
        comm_needs: for every pass, the communications that it needs.
        feeds: for every pass, the communications that move its result.
        comms: for every communication number, the communication of microbatch 0.
        comm_times: for every communication, its duration.
        sources: for every communication, how many passes feed it.
        members: for every communication, the ranks that take part.
        fillers: for every pass, whether no other pass waits for it: true for W, IB, and T without
            a barrier after it. Such passes can fill idle time.
        previous: for every pass, the same pass of the unit before: its number, and by how many
            microbatches it is earlier (0 or 1). Searches keep this order. Empty if microbatches are
            whole: a pass then follows itself, one microbatch earlier.
        waits_after: pass number -> the communication that the rank waits for immediately after this
            pass. Only a synchronous output layer has entries: T -> the barrier after T.
        followed_by: pass number -> the only pass that may come next on the rank. Only a synchronous
            output layer has entries: S -> T.
    """

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.microbatches = plan.microbatches
        places = [(rank, item) for rank in range(plan.ranks) for item in passes_of(plan, rank)]
        self.ranks = [rank for rank, _ in places]
        self.passes = [item for _, item in places]
        self._in_turns = [costs.in_turns(plan, rank, item) for rank, item in places]
        self.times = [own.time for own in self._in_turns]
        self.waits = [own.waits for own in self._in_turns]
        self._numbers = {_key(*place): n for n, place in enumerate(places)}
        needed = [needs(plan, rank, item) for rank, item in places]
        # Not a set: its order differs from process to process, but all ranks must number alike.
        self.comms = list(dict.fromkeys(c for all_ in needed for c in all_ if isinstance(c, Comm)))
        numbers = {comm: c for c, comm in enumerate(self.comms)}
        self.own_needs = [
            tuple(self._numbers[_key(rank, need)] for need in own if isinstance(need, Pass))
            for rank, own in zip(self.ranks, needed, strict=True)
        ]
        self.comm_needs = [
            tuple(numbers[c] for c in all_ if isinstance(c, Comm)) for all_ in needed
        ]
        self.comm_times = [costs.of_comm(comm, slices=plan.slices) for comm in self.comms]
        self.members = [participants(plan, comm) for comm in self.comms]
        feeding = [sources(plan, comm) for comm in self.comms]
        self.sources = [len(passes) for passes in feeding]
        self.feeds: list[list[int]] = [[] for _ in places]
        for c, passes in enumerate(feeding):
            for rank, item in passes:
                self.feeds[self._numbers[_key(rank, item)]].append(c)

        self.fillers = [
            item.kind in ("W", "IB", "T") and not feeds
            for item, feeds in zip(self.passes, self.feeds, strict=True)
        ]
        self.previous = self._in_order_of_units(plan.slices)
        self._pair_times: dict[tuple[int, int], float] = {}
        self.followed_by: dict[int, int] = {}
        self.waits_after: dict[int, int] = {}
        if plan.treatment.synchronous:
            for rank, s in product(range(plan.ranks), range(plan.slices)):
                t = self._numbers[rank, "T", 0, s]
                self.followed_by[self._numbers[rank, "S", 0, s]] = t
                if self.feeds[t]:
                    self.waits_after[t] = self.feeds[t][0]

    def _in_order_of_units(self, slices: int) -> list[tuple[int, int]]:
        if slices == 1:
            return []
        found = []
        for rank, item in zip(self.ranks, self.passes, strict=True):
            before = item.slice + (1 if item.kind in DESCENDING_KINDS else -1)
            earlier = int(before not in range(slices))
            other = item._replace(slice=before % slices)
            found.append((self._numbers[_key(rank, other)], earlier))
        return found

    def reversed(self) -> "Graph":
        """Return the graph of the same passes with time running backwards.

        The last microbatch has number 0.
        """
        mirror = copy(self)
        own: list[list[int]] = [[] for _ in self.passes]
        users: list[list[int]] = [[] for _ in self.comms]
        for number, needed in enumerate(self.own_needs):
            for need in needed:
                own[need].append(number)
        for number, comms in enumerate(self.comm_needs):
            for comm in comms:
                users[comm].append(number)
        mirror.own_needs = [tuple(numbers) for numbers in own]
        mirror.comm_needs = [tuple(fed) for fed in self.feeds]
        mirror.feeds = [list(needed) for needed in self.comm_needs]
        mirror.previous = [*self.previous]
        for number, (before, earlier) in enumerate(self.previous):
            mirror.previous[before] = number, earlier
        mirror.waits_after = {}
        mirror.followed_by = {after: before for before, after in self.followed_by.items()}
        mirror.sources = [len(numbers) for numbers in users]
        return mirror

    def with_microbatches(self, microbatches: int) -> "Graph":
        """Return the graph of the same passes for another number of microbatches."""
        other = copy(self)
        other.microbatches = microbatches
        return other

    def row(self, rank: int, row: tuple[Pass, ...]) -> list[int]:
        """Return the numbers of a rank's passes: ``n * m + i`` for pass n of microbatch i."""
        m, numbers = self.microbatches, self._numbers
        return [numbers[rank, kind, chunk, s] * m + i for kind, i, chunk, s in row]

    def rows(self, plan: Plan) -> list[list[int]]:
        """Return the numbers of the passes of all ranks."""
        return [self.row(rank, row) for rank, row in enumerate(plan.rows)]

    def pairs(self, plan: Plan) -> list[frozenset[int]]:
        """Return for every rank the numbers of the first passes of its pairs."""
        found: list[set[int]] = [set() for _ in range(plan.ranks)]
        for rank, item in plan.pairs:
            found[rank] |= {*self.row(rank, (item,))}
        return list(map(frozenset, found))

    def pair_time(self, one: int, other: int) -> float:
        """Return the duration of a pair of two passes, given by their numbers in a microbatch."""
        known = self._pair_times.get((one, other))
        if known is None:
            known = joined_time(self._in_turns[one], self._in_turns[other])
            self._pair_times[one, other] = known
        return known

    def turns(self, one: int, other: int) -> TurnOrder | None:
        """Return the turns of a pair; ``None``: its passes switch wherever they can."""
        return order_of_turns(self._in_turns[one], self._in_turns[other])

    def plan_row(self, row: Iterable[int]) -> tuple[Pass, ...]:
        """Return the passes that have these numbers: the inverse of ``row``."""
        m, passes = self.microbatches, self.passes
        made = ((passes[number], i) for number, i in (divmod(item, m) for item in row))
        return tuple(Pass(first.kind, i, first.chunk, first.slice) for first, i in made)

    def with_rows(
        self, plan: Plan, rows: Iterable[Iterable[int]], pairs: Iterable[Iterable[int]] = ()
    ) -> Plan:
        """Return ``plan`` with other rows, and with the pairs whose first passes are given."""
        firsts = (
            (rank, item) for rank, own in enumerate(pairs) for item in self.plan_row(sorted(own))
        )
        return replace(plan, rows=tuple(map(self.plan_row, rows)), pairs=frozenset(firsts))


def _key(rank: int, item: Pass) -> tuple[int, PassKind, int, int]:
    """Return a key that no other pass of the same microbatch has."""
    return rank, item.kind, item.chunk, item.slice
