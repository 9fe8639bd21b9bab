"""Lower a plan to a program: add communication, which schedule authors never write.

Every communication gets a place in one total order, that of the times at which its data exists when
the plan runs with the assumed costs. All ranks issue their communications in this order, each as
early as it can, and wait for them as late as they can. Nothing can deadlock at run time whatever
the real costs are: passes by end and communications by ready time are one topological order of
everything that waits for anything.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron.schedules.needs import Comm, needs, participants, sources
from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan
from megatron.schedules.timing import Timing, earliest, unit_cost

IN_FLIGHT_SENDS = 2
"""Buffers that a rank keeps per lane for messages that it sends and does not need itself."""


class Run(NamedTuple):
    """Execute a pass."""

    item: Pass


class Start(NamedTuple):
    """Issue a communication; does not block."""

    comm: Comm


class Wait(NamedTuple):
    """Wait until a communication that was started is done on this rank."""

    comm: Comm


Instruction = Run | Start | Wait


@dataclass(frozen=True)
class Program:
    """What every rank executes.

    Attributes:
        plan: the plan it was lowered from.
        rows: for each rank its instructions in order.
    """

    plan: Plan
    rows: tuple[tuple[Instruction, ...], ...]


def lane(plan: Plan, comm: Comm) -> tuple[str | int, ...]:
    """Return the queue in which ``comm`` runs.

    There is one per directed link and kind, and one for all collectives. Communications of one lane
    have the same participants and run one after another. (On NCCL the links of one direction that
    meet on a rank share a communicator and run one after another too; that is not modelled.)
    """
    if comm.kind in ("X", "G"):
        return (comm.kind, *participants(plan, comm))
    return ("vocabulary",)


def lower(plan: Plan, cost: Callable[[int, Pass], float] = unit_cost) -> Program:
    """Return the program of a checked ``plan``.

    Args:
        plan: a plan that ``check`` accepts.
        cost: assumed duration of a pass on a rank; decides the order only.
    """
    timing = earliest(plan, cost)
    assert not timing.stuck, "lower takes checked plans"
    order = sorted(timing.ready, key=timing.ready.__getitem__)  # stable: see Timing.ready
    issued: list[list[Comm]] = [[] for _ in plan.rows]
    for comm in order:
        for rank in participants(plan, comm):
            issued[rank].append(comm)
    return Program(
        plan, tuple(_lower_row(plan, rank, timing, issued[rank]) for rank in range(plan.ranks))
    )


def _lower_row(plan: Plan, rank: int, timing: Timing, comms: list[Comm]) -> tuple[Instruction, ...]:
    row = plan.rows[rank]
    users = [[n for n in needs(plan, rank, item) if isinstance(n, Comm)] for item in row]
    used = {comm for user in users for comm in user}
    issue = _Issue(plan, rank, comms, used, timing.ready)
    waited: set[Comm] = set()
    for index, (item, user) in enumerate(zip(row, users, strict=True)):
        issue.before(index, timing.ends[rank][index], user)
        for comm in user:
            if comm not in waited:
                waited.add(comm)
                issue.program.append(Wait(comm))
        issue.program.append(Run(item))
    issue.rest()
    return tuple(issue.program)


class _Issue:
    """Issues one rank's communications in the common order while its passes go by."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        comms: list[Comm],
        used: set[Comm],
        ready: Mapping[Comm, float],
    ) -> None:
        self.program: list[Instruction] = []
        self._plan = plan
        self._comms = comms
        self._used = used
        self._ready = ready
        self._position = {comm: position for position, comm in enumerate(comms)}
        self._next = 0
        place = {item: index for index, item in enumerate(plan.rows[rank])}
        self._own = [
            (position, place[item])
            for position, comm in enumerate(comms)
            for r, item in sources(plan, comm)
            if r == rank
        ]
        """(position in the order, index of the pass that feeds it) of all that this rank feeds."""
        self._fed = 0
        self._sent: dict[tuple[object, ...], list[Comm]] = defaultdict(list)

    def before(self, index: int, now: float, needed: Iterable[Comm]) -> None:
        """Issue what can go before pass ``index`` of the row, which ends at ``now``.

        What this rank feeds goes as soon as its own part exists. What it only receives goes when
        the pass needs it, when its data will exist before the pass ends, or when the common order
        puts it before something that goes now: a receive that nobody answers yet occupies the
        device.
        """
        end = self._next
        while self._fed < len(self._own) and self._own[self._fed][1] < index:
            end = self._own[self._fed][0] + 1
            self._fed += 1
        limit = self._own[self._fed][0] if self._fed < len(self._own) else len(self._comms)
        while end < limit and self._ready[self._comms[end]] < now:
            end += 1
        self._start_until(max([end, *(self._position[comm] + 1 for comm in needed)]))

    def rest(self) -> None:
        """Issue all that is left and wait for every message that this rank only sends."""
        self._start_until(len(self._comms))
        self.program.extend(Wait(comm) for queue in self._sent.values() for comm in queue)

    def _start_until(self, end: int) -> None:
        for comm in self._comms[self._next : end]:
            if comm not in self._used:
                queue = self._sent[comm.kind, lane(self._plan, comm)]
                if len(queue) == IN_FLIGHT_SENDS:
                    self.program.append(Wait(queue.pop(0)))
                queue.append(comm)
            self.program.append(Start(comm))
        self._next = end
