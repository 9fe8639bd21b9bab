"""The clock of every rank of a program, computed with whole numbers in place of instructions.

A program is numbered once and then simulated with any costs: a dry run simulates each of its
programs several times. Each rank has a compute lane, and communication lanes that overlap with it.
A communication begins when every participant has issued it and its lane is free. It ends after the
time that is its cost.
"""

from collections.abc import Sequence

from megatron.schedules.buckets import gathering, reduction
from megatron.schedules.costs import Costs
from megatron.schedules.lower import Instruction, Program, Run, Start, lane
from megatron.schedules.needs import REPLICA_KINDS, Comm, participants
from megatron.schedules.passes import Pass


def pass_time(program: Program, costs: Costs, rank: int, item: Pass) -> float:
    """Return the time of a pass of ``program``; U takes its bucket's share of the cost of U.

    The share is that of the gradients: of a gathering, a bucket in 8 bits has a smaller one.
    """
    share, shares = 1.0, program.shares
    if item.kind == "U":
        gathered = shares[gathering(rank, item.microbatch)]
        share = shares.get(reduction(rank, item.microbatch), gathered)
    return costs.of_pass(program.plan, rank, item, share)


def comm_time(program: Program, costs: Costs, comm: Comm) -> float:
    """Return the time of a communication of ``program``; a bucket takes its share of the cost."""
    return costs.of_comm(comm, program.shares.get(comm, 1.0), program.plan.slices)


class Numbered:
    """The instructions of a program as whole numbers.

    A number from 0 on means one of the ``steps`` of the rank. Communication c begins at -1 - 2 c
    and is waited for at -2 - 2 c.

    Attributes:
        program: the program.
        rows: for every rank its instructions.
        steps: for every rank the first run of each distinct step: passes of one kind, chunk and
            slice take equally long, and so do pairs of such passes.
        comms: every communication.
        alike: for every communication, the number of the first one that takes equally long, which
            may be of another microbatch.
        members: for every communication, the ranks that take part.
        lanes: for every communication, the number of its lane.
        queues: number of lanes.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.rows: list[list[int]] = []
        self.steps: list[list[Run]] = []
        self.comms: list[Comm] = []
        self.alike: list[int] = []
        self.members: list[tuple[int, ...]] = []
        self.lanes: list[int] = []
        self._numbers: dict[Comm, int] = {}
        self._firsts: dict[Comm, int] = {}
        self._queues: dict[tuple[str | int, ...], int] = {}
        for row in program.rows:
            self._add(row)
        self.queues = len(self._queues)

    def _add(self, row: Sequence[Instruction]) -> None:
        """Number the next rank's row."""
        numbers, steps, known = list[int](), list[Run](), dict[object, int]()
        comms = self._numbers
        for step in row:
            if isinstance(step, Run):
                key = _place(step.item)
                if step.joined is not None:
                    key = key, _place(step.joined)
                number = known.setdefault(key, len(steps))
                if number == len(steps):
                    steps.append(step)
                numbers.append(number)
            else:
                comm = step.comm
                at = comms[comm] if comm in comms else self._number(comm)
                numbers.append((-1 if isinstance(step, Start) else -2) - 2 * at)
        self.rows.append(numbers)
        self.steps.append(steps)

    def _number(self, comm: Comm) -> int:
        """Number a communication that no row before had."""
        plan, at = self.program.plan, len(self.comms)
        first = comm if comm.kind in REPLICA_KINDS else comm._replace(microbatch=0)
        alike = self._firsts.setdefault(first, at)
        if alike == at:
            queue = lane(plan, comm)
            self.members.append(participants(plan, comm))
            self.lanes.append(self._queues.setdefault(queue, len(self._queues)))
        else:
            self.members.append(self.members[alike])
            self.lanes.append(self.lanes[alike])
        self._numbers[comm] = at
        self.comms.append(comm)
        self.alike.append(alike)
        return at


def _place(item: Pass) -> tuple[object, ...]:
    """Return a key that is equal for passes of a rank that take equally long."""
    return item if item.kind == "U" else (item.kind, item.chunk, item.slice)


class _Durations:
    """The times of the steps and communications of a program.

    Attributes:
        steps: for every rank, the time of each of its steps.
        firsts: for every rank and step, the part of a pair's time that counts as its first pass;
            ``None`` for a pass by itself.
        comms: the time of every communication.
    """

    def __init__(self, numbered: Numbered, costs: Costs) -> None:
        program = numbered.program
        self.steps: list[list[float]] = []
        self.firsts: list[list[float | None]] = []
        for rank, steps in enumerate(numbered.steps):
            times = [_step_time(program, costs, rank, step) for step in steps]
            self.steps.append([time for time, _ in times])
            self.firsts.append([first for _, first in times])
        self.comms = list[float]()
        for at, (comm, alike) in enumerate(zip(numbered.comms, numbered.alike, strict=True)):
            known = alike < at
            self.comms.append(self.comms[alike] if known else comm_time(program, costs, comm))


def _step_time(program: Program, costs: Costs, rank: int, step: Run) -> tuple[float, float | None]:
    """Return the time of a pass or a pair, and the part of a pair's time for its first pass."""
    time = pass_time(program, costs, rank, step.item)
    if step.joined is None:
        return time, None
    pair = step.item, step.joined
    taken = costs.of_pair(program.plan, rank, pair, turns=step.turns)
    both = time + pass_time(program, costs, rank, step.joined)
    return taken, taken * (time / both if both else 0.0)


class Clocks:
    """The times of a program with given costs.

    Attributes:
        numbered: the program.
        after: for every rank, the time after each instruction of its row.
        begins: for every communication, when it begins.
        ends: for every communication, when it ends.
        stretches: rank, first instruction and end of every stretch of a row that is walked without
            a wait for another rank, in the order of the walk.
    """

    def __init__(self, program: Program | Numbered, costs: Costs) -> None:
        """Simulate a program.

        Raises:
            ValueError: if a kind of pass has no cost, or the program deadlocks.
        """
        numbered = program if isinstance(program, Numbered) else Numbered(program)
        self.numbered = numbered
        self.after: list[list[float]] = [[] for _ in numbered.rows]
        self.begins = [0.0] * len(numbered.comms)
        self.ends = [0.0] * len(numbered.comms)
        self.stretches: list[tuple[int, int, int]] = []
        self._durations = _Durations(numbered, costs)
        self._missing = list(map(len, numbered.members))
        self._free = [0.0] * numbered.queues
        self._sleepers: dict[int, list[int]] = {}
        awake = list(range(len(numbered.rows)))
        while awake:
            awake.extend(self._advance(awake.pop()))
        if any(len(a) < len(row) for a, row in zip(self.after, numbered.rows, strict=True)):
            raise ValueError("the program deadlocks: it was not lowered from a checked plan")

    def _advance(self, rank: int) -> list[int]:
        """Let ``rank`` go on until it must wait; return the ranks that can go on afterwards."""
        row, after, times = self.numbered.rows[rank], self.after[rank], self._durations.steps[rank]
        missing, ends = self._missing, self.ends
        first = at = len(after)
        now = after[-1] if after else 0.0
        woken: list[int] = []
        while at < len(row):
            number = row[at]
            if number >= 0:
                now += times[number]
            elif number & 1:  # -1 - 2 c begins communication c
                comm = -number >> 1
                missing[comm] -= 1
                if now > self.begins[comm]:
                    self.begins[comm] = now
                if not missing[comm]:
                    woken.extend(self._begun(comm))
            else:
                comm = (-number >> 1) - 1
                if missing[comm]:
                    self._sleepers.setdefault(comm, []).append(rank)
                    break
                if ends[comm] > now:
                    now = ends[comm]
            after.append(now)
            at += 1
        self.stretches.append((rank, first, at))
        return woken

    def _begun(self, comm: int) -> list[int]:
        """Note a communication that all have issued; return the ranks that have waited for it."""
        queue = self.numbered.lanes[comm]
        start = max(self.begins[comm], self._free[queue])
        self.begins[comm] = start
        self._free[queue] = self.ends[comm] = start + self._durations.comms[comm]
        return self._sleepers.pop(comm, [])

    @property
    def program(self) -> Program:
        """The program."""
        return self.numbered.program

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.after)

    @property
    def end(self) -> float:
        """End of the last pass or communication."""
        last = max((row[-1] for row in self.after if row), default=0.0)
        return max(last, max(self.ends, default=0.0))

    def first_part(self, rank: int, number: int) -> float | None:
        """Return the part of a pair's time for its first pass; ``None``: the pass is alone."""
        return self._durations.firsts[rank][number]

    def passes(self, rank: int) -> list[tuple[float, float]]:
        """Return the start and the end of every pass of a rank, in order."""
        found, before = list[tuple[float, float]](), 0.0
        firsts = self._durations.firsts[rank]
        for number, after in zip(self.numbered.rows[rank], self.after[rank], strict=True):
            if number >= 0:
                first = firsts[number]
                if first is None:
                    found.append((before, after))
                else:
                    found += [(before, before + first), (before + first, after)]
            before = after
        return found

    def work(self, rank: int) -> float:
        """Return the time that a rank spends in passes."""
        return sum(end - start for start, end in self.passes(rank))

    def idle(self) -> float:
        """Return the share of the time from 0 to ``end`` in which ranks run no pass, on average."""
        return 1 - sum(map(self.work, range(self.ranks))) / (self.ranks * self.end)
