"""Records the passes of the last iterations of a run, where recording costs next to nothing.

On a CPU a record is two readings of a clock, beside a pass that takes milliseconds. On a GPU it is
two events and a wait for the device, so there only iterations that a flag names are timed.
"""

from collections import Counter, deque
from typing import Final

from megatron.runtime.clocks import Offset, clock_offset
from megatron.runtime.observer import Observer
from megatron.runtime.timeline import Recorder
from megatron.schedules.plan import Plan
from megatron.simulator.costs.from_timelines import as_all_joined
from megatron.simulator.simulate import Timeline
from megatron.training.setup import TrainState

KEPT: Final = 5
"""Iterations of which the record is kept: the last ones, so that a long run needs no more memory
than a short one."""


class LastPasses:
    """Observes one rank's iterations; all ranks call it alike.

    Args:
        state: the rank.
        machines: number of machines, whose clocks need not agree.
    """

    def __init__(self, state: TrainState, machines: int = 1) -> None:
        self._state = state
        self._is_cheap = state.groups.device.type == "cpu"
        several = machines > 1 and self._is_cheap
        self._offset = clock_offset(state.groups.world_hosts) if several else Offset()
        self._recorder: Recorder | None = None
        self._kept: deque[tuple[int, Plan, Recorder]] = deque(maxlen=KEPT)

    def begin(self, other: Observer | None) -> Observer | None:
        """Return the observer of an iteration: ``other`` if there is one.

        If ``other`` is a recorder, by clocks that agree between ranks, its record is kept too.
        """
        self._recorder = other if isinstance(other, Recorder) else None
        if other is not None or not self._is_cheap:
            return other
        groups = self._state.groups
        self._recorder = Recorder(groups.pipeline.rank, groups.device)
        self._recorder.begin(self._offset.seconds)
        return self._recorder

    def finished(self, iteration: int) -> None:
        """Keep the record of ``iteration``, counted from 0, if it has one."""
        if self._recorder is not None:
            self._kept.append((iteration, self._state.plan, self._recorder))
        self._recorder = None

    def timelines(self) -> dict[int, Timeline]:
        """Return the recorded iterations of the plan that runs now, by number; all ranks call it.

        An iteration whose passes ran twice, because a step was redone, is left out. Replicas and
        tensor-parallel ranks make several pipelines. The first one counts, and its exchanges begin
        when the last replica has joined.
        """
        if not self._kept:  # on all ranks alike
            return {}
        state, groups = self._state, self._state.groups
        own = {
            number: state.pipeline.timeline(recorder)
            for number, plan, recorder in self._kept
            if plan is state.plan
        }
        replicas = groups.data.all_gather_object(own)
        joined = {number: as_all_joined([each[number] for each in replicas]) for number in own}
        first: dict[int, Timeline] = groups.tensor_sums.all_gather_object(joined)[0]
        return {number: timeline for number, timeline in first.items() if _ran_once(timeline)}


def _ran_once(timeline: Timeline) -> bool:
    passes = Counter((s.rank, s.label) for s in timeline.spans if s.lane == "compute")
    return max(passes.values(), default=0) == 1
