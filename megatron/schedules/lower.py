"""Lower a plan to a program: add communication, which schedule authors never write.

Every communication gets a place in one total order, that of the times at which its data exists when
the plan runs with the assumed costs. All ranks issue their communications in this order, each as
early as it can, and wait for them as late as they can. Nothing can deadlock at run time whatever
the real costs are: passes by end and communications by ready time are one topological order of
everything that waits for anything.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.schedules.costs import UNIT_COSTS, Costs
from megatron.schedules.graph import Graph
from megatron.schedules.needs import Comm, participants
from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan
from megatron.schedules.timing import Walk, walk

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


def lower(plan: Plan, costs: Costs = UNIT_COSTS) -> Program:
    """Return the program of a checked ``plan``.

    Args:
        plan: a plan that ``check`` accepts.
        costs: durations; decide the order only.
    """
    graph = Graph(plan, costs)
    rows = [graph.row(rank, row) for rank, row in enumerate(plan.rows)]
    run = walk(graph, rows)
    assert not run.stuck, "lower takes checked plans"
    messages = _Messages(plan, graph, rows, run)
    return Program(plan, tuple(_lower_row(messages, rank) for rank in range(plan.ranks)))


class _Messages:
    """The communications of a plan, numbered as in ``Graph``, and what all ranks know of them.

    Attributes:
        order: all communications in the common order, that in which their data exists.
        starts: the instruction that issues each.
        waits: the instruction that waits for each.
        lanes: kind and lane of each, its microbatch left out.
        blocking: for each, its microbatch left out, whether a rank that takes part waits on the
            spot.
    """

    def __init__(self, plan: Plan, graph: Graph, rows: Sequence[Sequence[int]], run: Walk) -> None:
        m = graph.microbatches
        self.plan, self.graph, self.rows, self.run = plan, graph, rows, run
        comms = [comm._replace(microbatch=i) for comm in graph.comms for i in range(m)]
        self.starts = list(map(Start, comms))
        self.waits = list(map(Wait, comms))
        self.lanes = [(comm.kind, *lane(plan, comm)) for comm in graph.comms]
        treatment = plan.treatment
        met = {"C0", *(b.kind for b in treatment.barriers)} if treatment.synchronous else set()
        self.blocking = [comm.kind in met for comm in graph.comms]
        self.order = self._common_order()

    def _common_order(self) -> list[int]:
        """Return all communications by the time at which their data exists.

        Where ranks meet for the output layer, its broadcast comes when the last of them is there,
        just before the first barrier: it would block whoever takes part earlier.
        """
        latest = self.run.latest
        order = sorted(
            self.run.complete, key=latest.__getitem__
        )  # stable: each after what it needs
        if not self.plan.treatment.synchronous:
            return order
        m, kinds = self.graph.microbatches, [comm.kind for comm in self.graph.comms]
        broadcast, barrier = kinds.index("C0"), self.plan.treatment.barriers[0].kind
        met: list[int] = []
        for comm in order:
            if kinds[comm // m] == barrier:
                met.append(broadcast * m + comm % m)
            if comm // m != broadcast:
                met.append(comm)
        return met


def _lower_row(messages: _Messages, rank: int) -> tuple[Instruction, ...]:
    plan, graph, m = messages.plan, messages.graph, messages.graph.microbatches
    issue = _Issue(messages, rank)
    waited = bytearray(m * len(graph.comms))
    ends = messages.run.ends[rank]
    for index, (item, number) in enumerate(zip(plan.rows[rank], messages.rows[rank], strict=True)):
        needed = [comm * m + item.microbatch for comm in graph.comm_needs[number // m]]
        issue.before(index, ends[index], needed)
        for comm in needed:
            if not waited[comm] and not messages.blocking[comm // m]:
                waited[comm] = 1
                issue.program.append(messages.waits[comm])
        issue.program.append(Run(item))
    issue.rest()
    return tuple(issue.program)


class _Issue:
    """Issues one rank's communications in the common order while its passes go by."""

    def __init__(self, messages: _Messages, rank: int) -> None:
        graph, m = messages.graph, messages.graph.microbatches
        self.program: list[Instruction] = []
        self._messages, self._microbatches = messages, m
        member = [rank in members for members in graph.members]
        self._comms = [comm for comm in messages.order if member[comm // m]]
        self._position = {comm: position for position, comm in enumerate(self._comms)}
        own = {number // m for number in messages.rows[rank]}
        self._used = {comm for number in own for comm in graph.comm_needs[number]}
        self._next = 0
        self._own = sorted(
            (self._position[comm * m + number % m], index)
            for index, number in enumerate(messages.rows[rank])
            for comm in graph.feeds[number // m]
            if not (messages.blocking[comm] and graph.comms[comm].kind == "C0")
        )
        """(position in the order, index of the pass that feeds it) of all that this rank feeds."""
        self._fed = 0
        self._sent: dict[tuple[object, ...], list[int]] = defaultdict(list)

    def before(self, index: int, now: float, needed: Iterable[int]) -> None:
        """Issue what can go before pass ``index`` of the row, which ends at ``now``.

        What this rank feeds goes as soon as its own part exists. What it only receives goes when
        the pass needs it, when its data will exist before the pass ends, or when the common order
        puts it before something that goes now: a receive that nobody answers yet occupies the
        device. What would block the rank never goes ahead of need.
        """
        end = self._next
        own, latest, m = self._own, self._messages.run.latest, self._microbatches
        while self._fed < len(own) and own[self._fed][1] < index:
            end = own[self._fed][0] + 1
            self._fed += 1
        limit = own[self._fed][0] if self._fed < len(own) else len(self._comms)
        while end < limit and latest[comm := self._comms[end]] < now:
            if self._messages.blocking[comm // m]:
                break
            end += 1
        self._start_until(max([end, *(self._position[comm] + 1 for comm in needed)]))

    def rest(self) -> None:
        """Issue all that is left and wait for every message that this rank only sends."""
        self._start_until(len(self._comms))
        waits = self._messages.waits
        self.program.extend(waits[comm] for queue in self._sent.values() for comm in queue)

    def _start_until(self, end: int) -> None:
        messages, m = self._messages, self._microbatches
        for comm in self._comms[self._next : end]:
            kind = comm // m
            if messages.blocking[kind]:
                self.program += [messages.starts[comm], messages.waits[comm]]
                continue
            if kind not in self._used:
                queue = self._sent[messages.lanes[kind]]
                if len(queue) == IN_FLIGHT_SENDS:
                    self.program.append(messages.waits[queue.pop(0)])
                queue.append(comm)
            self.program.append(messages.starts[comm])
        self._next = end
