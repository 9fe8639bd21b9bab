"""Run what the hosts of all ranks have issued, as devices would: does everybody come to an end?

A stream does one step after the other. A communication occupies its stream until all who take part
have started it, and its communicator has one at a time, or a batch of transfers. In NCCL's implicit
order it starts when all those that its host has issued before have started, whatever communicator
they are on. A device may take only so much at a time, and then holds up its host; at worst the host
issues nothing more before all but its transfers are done.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import TypeAlias

from pretended_gpu.order import HOST, Issued, Mark, Step

Key: TypeAlias = tuple[str | int, ...]
"""The same for all ranks that take part in a communication, and for no other."""

TRANSFER = "transfer"


def name_of(use: str, members: Sequence[int], ranks: int) -> str:
    """Name a communicator for its use; if it is not of all ranks, after its members too."""
    return use if len(members) == ranks else f"{use} of {'+'.join(map(str, members))}"


def members_of(group: str, ranks: int) -> list[int]:
    """Return the ranks of a communicator that ``name_of`` has named, by place."""
    _, _, named = group.partition(" of ")
    return list(map(int, named.split("+"))) if named else list(range(ranks))


def stuck(
    journals: Sequence[Sequence[Step]], held_up: bool = False, implicit: bool = True
) -> list[str]:
    """Return what hinders every rank that does not come to its end, in words.

    Args:
        journals: of all ranks.
        held_up: hosts wait whenever the device has something to do.
        implicit: launch in NCCL's implicit order; otherwise each communicator has its own.
    """
    journals = [_held_up(journal) if held_up else journal for journal in journals]
    ranks = len(journals)
    devices = [_Device(rank, own, ranks, implicit) for rank, own in enumerate(journals)]
    parts = {key: _parts(key, len(journals)) for own in devices for key in own.keys.values()}
    started: Counter[Key] = Counter()
    done: set[Key] = set()
    going_on = True
    while going_on:
        going_on = False
        for device in devices:
            starting = device.go_on(done)
            while starting is not None:
                going_on = True
                started.update(starting)
                done.update(key for key in starting if started[key] == parts[key])
                starting = device.go_on(done)
    return [f"rank {device.rank}: {what}" for device in devices for what in device.hindrances()]


class _Device:
    """One rank's device and its host.

    Attributes:
        rank: whose it is.
        keys: of its communications, by their place in the journal.
    """

    def __init__(self, rank: int, journal: Sequence[Step], ranks: int, implicit: bool) -> None:
        self.rank = rank
        self._implicit = implicit
        self.keys: dict[int, Key] = {}
        self._journal = journal
        self._issued = 0
        self._queues: dict[str, deque[int]] = defaultdict(deque)
        self._done: Mark = {}
        self._under_way: dict[str, list[int]] = defaultdict(list)
        self._started: set[int] = set()
        counts: Counter[Key] = Counter()
        for place, step in enumerate(journal):
            if step.issued is not None:
                way, what = _way(rank, step.issued, ranks), _what(step.issued)
                self.keys[place] = (*way, counts[way], *what)
                counts[way] += 1
        self._to_start = deque(p for p in self.keys if not self._of(p).on_host)

    def go_on(self, done: set[Key]) -> list[Key] | None:
        """Do what can be done; return the communications that start, or None if nothing can."""
        before = self._issued, sum(map(len, self._queues.values()))
        starting: list[Key] = []
        self._issue()
        for queue in self._queues.values():
            while queue and self._is_past(queue[0], done, starting):
                step = self._journal[queue.popleft()]
                self._done[step.stream] = step.number
        after = self._issued, sum(map(len, self._queues.values()))
        return starting if starting or after != before else None

    def hindrances(self) -> list[str]:
        """What the streams and the host stand at."""
        heads = [queue[0] for queue in self._queues.values() if queue]
        heads += [self._issued] if self._issued < len(self._journal) else []
        steps = [self._journal[place] for place in heads]
        return [f"{step.stream} at {step.issued or 'a wait'}" for step in steps]

    def _issue(self) -> None:
        while self._issued < len(self._journal):
            step = self._journal[self._issued]
            if step.stream != HOST:
                self._queues[step.stream].append(self._issued)
            elif not self._reached(step.awaits):
                return
            self._issued += 1

    def _is_past(self, place: int, done: set[Key], starting: list[Key]) -> bool:
        """Whether the step at the head of a queue is through; start it if it can."""
        step = self._journal[place]
        if not self._reached(step.awaits):
            return False
        if step.issued is None:
            return True
        key = self.keys[place]
        if place not in self._started and self._may_start(place, done):
            self._started.add(place)
            if not self._is_joined(place):
                self._under_way[step.issued.group].clear()
            self._under_way[step.issued.group].append(place)
            starting.append(key)
            if not step.issued.on_host:
                self._to_start.remove(place)
        return place in self._started and key in done

    def _may_start(self, place: int, done: set[Key]) -> bool:
        issued = self._of(place)
        if issued.on_host:
            return True
        is_next = not self._implicit or self._to_start[0] == place
        before = self._under_way[issued.group]
        return is_next and (self._is_joined(place) or all(self.keys[own] in done for own in before))

    def _is_joined(self, place: int) -> bool:
        """Whether others of its batch have started."""
        issued = self._of(place)
        before = self._under_way[issued.group]
        return issued.batch > 0 and any(self._of(own).batch == issued.batch for own in before)

    def _reached(self, mark: Mark) -> bool:
        return all(self._done.get(stream, 0) >= number for stream, number in mark.items())

    def _of(self, place: int) -> Issued:
        issued = self._journal[place].issued
        assert issued is not None
        return issued


def _held_up(journal: Sequence[Step]) -> Sequence[Step]:
    waiting = []
    for step in journal:
        waiting.append(step)
        if step.stream != HOST and (step.issued is None or not step.issued.is_transfer):
            waiting.append(Step(HOST, 0, {step.stream: step.number}))
    return waiting


def _parts(key: Key, ranks: int) -> int:
    """Return how many ranks take part: both ends of a transfer, or all of the communicator."""
    group, *_, kind, _ = key
    return 2 if kind == TRANSFER else len(members_of(str(group), ranks))


def _way(rank: int, issued: Issued, ranks: int) -> Key:
    """Return what communications that come one after the other have in common."""
    if not issued.is_transfer:
        return (issued.group,)
    peer = members_of(issued.group, ranks)[issued.peer]
    ends = (rank, peer) if issued.kind == "send" else (peer, rank)
    return (issued.group, *ends)


def _what(issued: Issued) -> Key:
    """Return what all who take part must agree on: its kind and root."""
    return (TRANSFER, -1) if issued.is_transfer else (issued.kind, issued.peer)
