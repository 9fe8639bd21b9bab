"""Observes a run's iterations, and saves or uses the observations between them.

``--record-timeline`` records the last iteration, ``--profile-schedule-start`` times the passes of
some iterations, and ``--profile`` names the passes for profilers.
"""

from collections.abc import Callable

from megatron.run.log import LogSettings
from megatron.runtime.clocks import common_start
from megatron.runtime.observer import NamedRanges, Observer
from megatron.runtime.timeline import Recorder
from megatron.schedules.costs import Costs
from megatron.simulator.costs.from_timelines import as_all_joined, costs_from_timelines
from megatron.simulator.costs.planned_waits import with_planned_waits
from megatron.simulator.draw.trace import save_chrome_trace
from megatron.simulator.simulate import Timeline, simulate
from megatron.simulator.timeline_file import save_timeline
from megatron.training.outputs import PLANNED, TRACE, why_unwritten
from megatron.training.profiling.replan import (
    PlanWith,
    Trial,
    describe_costs,
    describe_replanned,
    describe_tried,
    end_trial,
    replan,
    save_measured,
)
from megatron.training.setup import TrainState


class Observation:
    """Observes one rank's iterations, which are counted from 0 here and from 1 in the flags."""

    def __init__(
        self,
        config: LogSettings,
        state: TrainState,
        last: int,
        plan_with: PlanWith,
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._state = state
        self._plan_with = plan_with
        self._say = say
        timed = config.timed_iterations
        self._measured = range(timed.start - 1, timed.stop - 1)
        named = range(config.profile_step_start - 1, config.profile_step_end - 1)
        self._named = named if config.profile else range(0)
        self._last = None if config.record_timeline is None else last
        self._recorder: Recorder | None = None
        self._clock_error = 0.0
        self._timelines: list[Timeline] = []
        self._costs: Costs | None = None
        self._trial: Trial | None = None

    def times(self, iteration: int) -> bool:
        """Return whether ``iteration`` is timed; a timed iteration must run alone and only once."""
        return iteration in self._measured or iteration == self._last

    def passed_over(self, iteration: int) -> None:
        """Note that ``iteration`` is skipped; every rank calls this instead of ``begin``."""
        if iteration in self._measured:  # a later iteration is measured in its place
            self._measured = range(self._measured.start, self._measured.stop + 1)
        if iteration == self._last:
            self._say("--record-timeline: the last iteration is skipped, and nothing is recorded")

    def begin(self, iteration: int) -> Observer | None:
        """Return an iteration's observer, if any; every rank calls it before each iteration."""
        state = self._state
        self._recorder = None
        if self.times(iteration):
            self._recorder = Recorder(state.groups.pipeline.rank, state.groups.device)
            start, offset = common_start(state.groups)
            self._clock_error = offset.error
            self._recorder.begin(start)
        if iteration in self._named:
            return NamedRanges(state.groups.device, self._recorder)
        return self._recorder

    def finished(self, iteration: int) -> None:
        """Save or use the record of an iteration; every rank calls it after each iteration."""
        if self._recorder is None:
            return
        timeline = self._state.pipeline.timeline(self._recorder)
        if iteration in self._measured:
            self._timelines.append(timeline)
            if iteration == self._measured[-1]:
                self._use_measured()
        if iteration == self._last:
            self._save(timeline)

    def _use_measured(self) -> None:
        """Use the timelines of ``_measured``: of the first plan, or of a plan that is on trial.

        Every pipeline has measured its own timelines, but all pipelines must decide alike. Where
        tensor-parallel ranks make several pipelines, the first pipeline of every replica counts.
        """
        groups = self._state.groups
        everywhere = groups.data.all_gather_object(self._timelines)
        timelines = [as_all_joined(replicas) for replicas in zip(*everywhere, strict=True)]
        timelines = groups.tensor_sums.all_gather_object(timelines)[0]
        self._timelines = []
        costs = costs_from_timelines(self._state.plan, timelines)
        with_waits = with_planned_waits(costs, self._state.pipeline.costs)
        if self._trial is None:
            self._costs = with_waits
            self._use_costs(costs, with_waits, timelines)
            return
        tried = end_trial(self._trial, self._state, timelines)
        if tried.is_faster:
            self._costs = with_waits
        self._say(describe_tried(tried))

    def _use_costs(self, costs: Costs, with_waits: Costs, timelines: list[Timeline]) -> None:
        """Save the measured costs, and plan with them and with the waits that a count predicts."""
        config, state, measured = self._config, self._state, self._measured
        self._say(
            f"iterations {measured[0] + 1} to {measured[-1] + 1} measured: {describe_costs(costs)}",
        )
        if config.save_measured_costs is not None:
            unwritten = save_measured(state, costs, config.save_measured_costs)
            if unwritten is not None:
                self._say(unwritten)
        if config.replan:
            found, self._trial = replan(self._plan_with, state, with_waits, timelines)
            self._say(describe_replanned(found))
        if self._trial is not None:  # after an iteration in which the new plan gets its memory
            self._measured = range(measured.stop + 1, measured.stop + 1 + len(measured))

    def _save(self, timeline: Timeline) -> None:
        """Write the timeline, its trace, and the timeline as planned.

        The simulator makes the planned timeline from the program and from costs that were measured
        earlier. If no costs were measured, it takes the costs of this iteration. The measured and
        the planned timeline then differ only in effects that the simulator does not model.
        """
        state, path = self._state, self._config.record_timeline
        timeline = as_all_joined(state.groups.data.all_gather_object(timeline))
        error = max(state.groups.world.all_gather_object(self._clock_error))
        if state.groups.world.rank != 0 or path is None:
            return
        costs = self._costs or with_planned_waits(
            costs_from_timelines(state.plan, [timeline]), state.pipeline.costs
        )
        planned = simulate(state.pipeline.train_program, costs)

        def write() -> None:
            save_timeline(timeline, path)
            save_timeline(planned, path.with_suffix(PLANNED), is_own_name=True)
            save_chrome_trace(state.plan, timeline, path.with_suffix(TRACE), 1e6)

        self._say(
            why_unwritten("--record-timeline", write)
            or f"timeline of the last iteration: {path}, and beside it as planned ({PLANNED}) and "
            f"as a trace ({TRACE}); clocks of ranks agree within {error * 1e6:.0f} us",
        )
