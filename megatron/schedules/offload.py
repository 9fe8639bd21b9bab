"""Activations on the host: O copies them there after their F, L brings them back for the backward.

Between F and B a rank holds the activations of a chunk without reading them (PipeOffload, arXiv
2503.01328). Meanwhile they can wait in the memory of the host. O and L are communications of a rank
with its host, and run on a lane of their own, one after the other, while passes run. O moves all
tensors that the F of a chunk has left; their memory is free once the rank has waited for O. The
rank waits for L right before the first pass that reads the activations: R, or B without R.

``Plan.offloaded`` says how many chunks of every rank are moved. The chunks whose activations wait
longest are moved, because the same copies then free memory for a longer time. A microbatch of such
a chunk is moved if the lane has time for it. L is as late as possible, so that its memory is taken
late. O uses the time that is left; the longest waits come first. If an O would not be done in time,
its activations stay on the device. So by the assumed costs no pass waits for a copy, even if the
link is slow.

If microbatches are cut into slices, O and L are of a slice. The keys and values of a microbatch,
which later slices read, stay on the device.

No other rank takes part in O and L, and they add no wait for another rank. O follows its F, L
follows O, and the lane works in this order, so a program with copies cannot deadlock.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from megatron.schedules.costs import Costs
from megatron.schedules.needs import Comm
from megatron.schedules.plan import Plan


class Copy(NamedTuple):
    """A copy of a rank's row, with its place among the row's steps (passes, or pairs of passes).

    Attributes:
        comm: O or L.
        begun: step before which the copy begins, after the step before.
        awaited: step before which the rank waits for the copy.
    """

    comm: Comm
    begun: int
    awaited: int


class _Stay(NamedTuple):
    """The activations of one chunk and unit, from their F to the pass that reads them.

    Attributes:
        stage: stage of the chunk.
        microbatch: the microbatch.
        slice: the slice of the microbatch; 0 if microbatches are whole.
        born: step of the F.
        read: step of the first pass that reads the activations.
        time: from the end of the F to the start of the pass that reads.
    """

    stage: int
    microbatch: int
    slice: int
    born: int
    read: int
    time: float

    def comm(self, kind: Literal["O", "L"]) -> Comm:
        """Return the copy of these activations to the host, or back."""
        return Comm(kind, self.microbatch, self.stage, self.slice)


def copies(
    plan: Plan, rank: int, starts: Sequence[float], ends: Sequence[float], costs: Costs
) -> list[Copy]:
    """Return the copies of a rank, in the order of its lane.

    Args:
        plan: the plan.
        rank: pipeline rank.
        starts: assumed start of each pass of the rank's row.
        ends: assumed end of each pass.
        costs: durations of O and L; without them a copy takes no time.
    """
    if not plan.offloaded:
        return []
    begins, firsts = list[float](), list[int]()
    index = 0
    for step in plan.steps(rank):
        begins.append(starts[index])
        firsts.append(index)
        index += len(step)
    finishes = [ends[first] for first in firsts]
    lane = _Lane(begins, finishes, partial(costs.of_comm, slices=plan.slices))
    return lane.copies(_chosen(plan, list(_stays(plan, rank, begins, finishes))))


def _stays(
    plan: Plan, rank: int, begins: Sequence[float], finishes: Sequence[float]
) -> Iterator[_Stay]:
    """Yield all activations of a rank, in the order in which they are read."""
    reader = "R" if plan.recomputes else "B"
    born = {}
    for at, step in enumerate(plan.steps(rank)):
        for item in step:
            if item.kind == "F":
                born[item] = at
            elif item.kind == reader:
                since = born[item._replace(kind="F")]
                stage = plan.stage_of[rank, item.chunk]
                time = begins[at] - finishes[since]
                yield _Stay(stage, item.microbatch, item.slice, since, at, time)


def _chosen(plan: Plan, stays: Sequence[_Stay]) -> list[_Stay]:
    """Return the activations of the chunks whose activations wait longest."""
    total: dict[int, float] = {}
    for stay in stays:
        total[stay.stage] = total.get(stay.stage, 0.0) + stay.time
    longest = sorted(total, key=lambda stage: (-total[stage], stage))[: plan.offloaded]
    return [stay for stay in stays if stay.stage in longest]


class _Load(NamedTuple):
    """Activations, and the time at which their L begins."""

    stay: _Stay
    begin: float


class _Lane:
    """The copies of a rank, one after the other, while its steps run."""

    def __init__(
        self, begins: Sequence[float], finishes: Sequence[float], time: Callable[[Comm], float]
    ) -> None:
        self._begins, self._finishes, self._time = begins, finishes, time

    def copies(self, stays: Sequence[_Stay]) -> list[Copy]:
        """Return an O and an L of each of ``stays`` for which the lane has time.

        ``stays`` are in the order in which they are read.
        """
        made = list[tuple[float, float, Copy]]()
        for stay, stored, loaded in self._timed(stays):
            out, back = stay.comm("O"), stay.comm("L")
            begun = self._step_at(stored)
            end = stored + self._time(out)
            done = bisect_left(self._begins, end)
            awaited = max(done, begun + 1)
            again = min(self._step_at(loaded), stay.read)  # later, if passes take no time
            if awaited < again:  # otherwise no pass would run without the activations
                made.append((stored, end, Copy(out, begun, awaited)))
                made.append((loaded, loaded + self._time(back), Copy(back, again, stay.read)))
        made.sort(key=lambda own: own[:2])  # of two at one time, a copy without time goes first
        return [copy for _, _, copy in made]

    def _timed(self, stays: Sequence[_Stay]) -> Iterator[tuple[_Stay, float, float]]:
        """Yield activations that can be moved, with the times at which O and L begin."""
        loads = self._loads(stays)
        unborn = deque(sorted(range(len(loads)), key=lambda at: self._born(loads[at].stay)))
        waiting, stored = list[tuple[float, int]](), dict[int, float]()
        free = 0.0
        for at, (stay, loaded) in enumerate(loads):
            while True:
                while unborn and self._born(loads[unborn[0]].stay) <= free:
                    heappush(waiting, (-loads[unborn[0]].stay.time, unborn.popleft()))
                while waiting and waiting[0][1] < at:
                    heappop(waiting)  # too late: it is read already
                if waiting:
                    end = free + self._time(loads[waiting[0][1]].stay.comm("O"))
                    if end > loaded:
                        break
                    stored[heappop(waiting)[1]] = free
                    free = end
                elif unborn and self._born(loads[unborn[0]].stay) < loaded:
                    free = self._born(loads[unborn[0]].stay)
                else:
                    break
            if at in stored:
                yield stay, stored[at], loaded
                free = loaded + self._time(stay.comm("L"))

    def _born(self, stay: _Stay) -> float:
        return self._finishes[stay.born]

    def _loads(self, stays: Sequence[_Stay]) -> list[_Load]:
        """Return the latest L of each of ``stays`` that leaves time for its O before.

        Each L ends before the step before the one that reads, so that a slower copy does no harm.
        """
        loads, following = list[_Load](), float("inf")
        for stay in reversed(stays):
            end = min(following, self._begins[max(0, stay.read - 1)])
            begin = end - self._time(stay.comm("L"))
            if begin >= self._born(stay) + self._time(stay.comm("O")):
                loads.append(_Load(stay, begin))
                following = begin
        return loads[::-1]

    def _step_at(self, time: float) -> int:
        """Return the step that runs at ``time``; if none does, the next one."""
        running = max(0, bisect_right(self._begins, time) - 1)
        return running + (time >= self._finishes[running])
