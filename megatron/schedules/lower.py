"""Lower a plan to a program: add the communication, which schedules leave out.

All communications get one total order. They are sorted by the time at which their data exists when
the plan runs with the assumed costs. Every rank issues its communications in this order, each as
early as possible, and waits for each as late as possible. A run cannot deadlock, whatever the real
costs are: passes sorted by end time, together with communications sorted by the time at which their
data exists, form a topological order of all dependencies.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.schedules.costs import UNIT_COSTS, Costs
from megatron.schedules.graph import Graph
from megatron.schedules.needs import HOST_KINDS, REPLICA_KINDS, Comm, participants
from megatron.schedules.offload import Copy, copies
from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan
from megatron.schedules.timing import Walk, walk
from megatron.schedules.turn_order import TurnOrder

IN_FLIGHT_SENDS = 2
"""The most messages per link, and collectives per kind, that a rank may have started without
waiting for them; each needs a buffer. A collective cannot end before the last rank takes part. So
more collectives of a kind may be started, as long as the oldest is not done in the plan."""


class Run(NamedTuple):
    """Execute a pass, or the two passes of a pair together.

    Attributes:
        item: the pass, or the first of the pair.
        joined: the second of the pair; ``None`` if the pass runs by itself.
        turns: of the pair; ``None``: the passes switch wherever they can.
    """

    item: Pass
    joined: Pass | None = None
    turns: TurnOrder | None = None

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The pass, or the two passes of the pair."""
        return (self.item,) if self.joined is None else (self.item, self.joined)

    @property
    def name(self) -> str:
        """The text form: ``F5``, or ``F5|B2`` for a pair."""
        return "|".join(map(str, self.passes))


class Start(NamedTuple):
    """Issue a communication without waiting for it."""

    comm: Comm


class Wait(NamedTuple):
    """Wait until a communication that this rank has started is done."""

    comm: Comm


Instruction = Run | Start | Wait


@dataclass(frozen=True)
class Program:
    """The instructions of every rank.

    Attributes:
        plan: the plan that was lowered.
        rows: for each rank its instructions in order.
        shares: for every communication of a bucket, the bucket's share of the rank's parameters
            (``schedules.buckets`` adds them).
    """

    plan: Plan
    rows: tuple[tuple[Instruction, ...], ...]
    shares: Mapping[Comm, float] = field(default_factory=dict)

    def copies(self, rank: int) -> list[Comm]:
        """Return the copies of a rank to and from its host, in the order in which they begin."""
        begun = (step.comm for step in self.rows[rank] if isinstance(step, Start))
        return [comm for comm in begun if comm.kind in HOST_KINDS]


def lane(plan: Plan, comm: Comm) -> tuple[str | int, ...]:
    """Return the queue in which ``comm`` runs.

    The lanes are:

    * one for every link, which carries X or G (``kind``) from one rank to another;
    * one for all collectives of the vocabulary;
    * for every rank, one for the exchange with its replicas;
    * for every rank, one for copies to and from its host.

    Communications in a lane have the same participants and run one after another. With NCCL, every
    lane between ranks is a communicator.
    """
    if comm.kind in ("X", "G"):
        return (comm.kind, *participants(plan, comm))
    if comm.kind in HOST_KINDS:
        return ("host", *participants(plan, comm))
    return ("replicas", comm.stage) if comm.kind in REPLICA_KINDS else ("vocabulary",)


def lower(plan: Plan, costs: Costs = UNIT_COSTS) -> Program:
    """Return the program of a checked ``plan``.

    Args:
        plan: a plan that ``check`` accepts.
        costs: durations; they decide only the order of the communications, and of the turns of a
            pair.
    """
    graph = Graph(plan, costs)
    rows = graph.rows(plan)
    run = walk(graph, rows, graph.pairs(plan))
    assert not run.stuck, "lower takes checked plans"
    messages = _Messages(plan, graph, rows, run)
    lowered = [_lower_row(messages, rank) for rank in range(plan.ranks)]
    placed = [
        copies(plan, rank, run.starts[rank], run.ends[rank], costs) for rank in range(plan.ranks)
    ]
    return Program(plan, tuple(map(_with_copies, lowered, placed)))


def _with_copies(row: tuple[Instruction, ...], placed: Sequence[Copy]) -> tuple[Instruction, ...]:
    """Return a row with copies to and from the host: at each step first the waits for them.

    A copy begins right after the step before, not after that step's waits for other ranks.
    """
    if not placed:
        return row
    begun: dict[int, list[Instruction]] = defaultdict(list)
    awaited: dict[int, list[Instruction]] = defaultdict(list)
    for copy in placed:
        begun[copy.begun].append(Start(copy.comm))
        awaited[copy.awaited].append(Wait(copy.comm))
    made, step = list[Instruction](), 0
    for instruction in row:
        if isinstance(instruction, Run):
            made += awaited[step]
            step += 1
        made.append(instruction)
        if isinstance(instruction, Run):
            made += begun[step]
    return tuple(made)


class _Messages:
    """The communications of a plan, numbered as in ``Graph``, with facts that all ranks share.

    Attributes:
        orders: for every rank, its communications in the order that all ranks have in common, by
            the time at which their data exists.
        starts: for every communication, the instruction that issues it.
        waits: for every communication, the instruction that waits for it.
        lanes: for every communication of one microbatch, its kind and lane.
        blocking: for every communication of one microbatch, whether each participant waits for it
            immediately after issuing it.
        on_links: the communications of one microbatch that are messages from stage to stage.
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
        self.on_links = {c for c, comm in enumerate(graph.comms) if comm.kind in ("X", "G")}
        self.orders = self._orders()

    def _orders(self) -> list[list[int]]:
        m, members = self.graph.microbatches, self.graph.members
        found: list[list[int]] = [[] for _ in self.rows]
        for comm in self._common_order():
            for rank in members[comm // m]:
                found[rank].append(comm)
        return found

    def _common_order(self) -> list[int]:
        """Return all communications, sorted by the time at which their data exists.

        If the output layer is synchronous, C0 comes just before the first barrier, when the last
        rank has arrived: C0 blocks its participants, so an earlier start would only make them wait.
        """
        latest = self.run.latest
        order = sorted(
            self.run.complete, key=latest.__getitem__
        )  # stable: if times are equal, a communication stays after the communications it needs
        if not self.plan.treatment.synchronous:
            return order
        m, comms = self.graph.microbatches, self.graph.comms
        broadcasts = {comm.slice: c for c, comm in enumerate(comms) if comm.kind == "C0"}
        met: list[int] = []
        for number in order:
            comm = comms[number // m]
            if comm.kind == self.plan.treatment.barriers[0].kind:
                met.append(broadcasts[comm.slice] * m + number % m)
            if comm.kind != "C0":
                met.append(number)
        return met


def _lower_row(messages: _Messages, rank: int) -> tuple[Instruction, ...]:
    plan, graph, m = messages.plan, messages.graph, messages.graph.microbatches
    issue = _Issue(messages, rank)
    waited = bytearray(m * len(graph.comms))
    starts, ends = messages.run.starts[rank], messages.run.ends[rank]
    index = 0
    for step in plan.steps(rank):
        numbers = messages.rows[rank][index : index + len(step)]
        needed = [comm * m + n % m for n in numbers for comm in graph.comm_needs[n // m]]
        issue.before(index, ends[index], needed)
        issue.settle(starts[index])
        for comm in needed:
            if not waited[comm] and not messages.blocking[comm // m]:
                waited[comm] = 1
                issue.program.append(messages.waits[comm])
        if len(step) == 1:
            issue.program.append(Run(step[0]))
        else:
            one, other = (number // m for number in numbers)
            issue.program.append(Run(step[0], step[1], graph.turns(one, other)))
        index += len(step)
    issue.rest()
    return tuple(issue.program)


class _Issue:
    """Issues one rank's communications in the common order, from the first pass of its row on."""

    def __init__(self, messages: _Messages, rank: int) -> None:
        graph, m = messages.graph, messages.graph.microbatches
        self.program: list[Instruction] = []
        self._messages, self._microbatches = messages, m
        self._comms = messages.orders[rank]
        self._position = {comm: position for position, comm in enumerate(self._comms)}
        own = {number // m for number in messages.rows[rank]}
        self._used = {comm for number in own for comm in graph.comm_needs[number]}
        self._next = 0
        last_source = {
            self._position[comm * m + number % m]: index
            for index, number in enumerate(messages.rows[rank])
            for comm in graph.feeds[number // m]
            if not (messages.blocking[comm] and graph.comms[comm].kind == "C0")
        }
        self._own = sorted(last_source.items())
        """(position in the order, index of its last source pass here) of all communications with a
        source on this rank."""
        self._fed = 0
        self._sent: dict[tuple[object, ...], list[int]] = defaultdict(list)

    def before(self, index: int, now: float, needed: Iterable[int]) -> None:
        """Issue the communications that go before pass ``index`` of the row.

        The pass ends at ``now``, by the times of the plan.

        A communication that this rank contributes to is issued as soon as the rank's own part
        exists. A communication that this rank only receives is issued in one of three cases: the
        pass needs it, its data will exist before the pass ends, or a communication later in the
        common order is issued now. A receive is never issued earlier, because it would occupy the
        device while it waits for its sender. A blocking communication is issued only when a pass
        needs it.
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

    def settle(self, now: float) -> None:
        """Wait for collectives that no pass here needs and that the plan has ended by ``now``."""
        graph, run, m = self._messages.graph, self._messages.run, self._microbatches
        for queue in self._sent.values():
            while (
                len(queue) > IN_FLIGHT_SENDS
                and run.latest[queue[0]] + graph.comm_times[queue[0] // m] <= now
            ):
                self.program.append(self._messages.waits[queue.pop(0)])

    def rest(self) -> None:
        """Issue all remaining communications; wait for each that no pass here waits for."""
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
                if len(queue) == IN_FLIGHT_SENDS and kind in messages.on_links:
                    self.program.append(messages.waits[queue.pop(0)])
                queue.append(comm)
            self.program.append(messages.starts[comm])
        self._next = end
