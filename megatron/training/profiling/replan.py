"""Makes a new plan from the measured costs of real iterations while the run goes on.

Measured costs belong to the plan that ran: with another plan, a pass may find its data in another
cache, or wait for another neighbour's memory. So a new plan that is predicted to be faster runs on
trial first. When it has been measured as often as the old plan, the faster of both plans stays.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from megatron.planning.planned_run import RunPlan
from megatron.runtime.pipeline import Installed
from megatron.schedules.costs import Costs, Time
from megatron.schedules.plan import Plan
from megatron.simulator.costs.cost_file import save_costs
from megatron.simulator.simulate import Timeline, simulate
from megatron.training.outputs import why_unwritten
from megatron.training.setup import TrainState

PlanWith = Callable[[Costs], RunPlan]
"""Returns the run's plan for measured costs; its stages stay where they are."""


@dataclass(frozen=True)
class Replanned:
    """The result of planning with measured costs.

    ``before`` and ``after`` are predicted seconds of an iteration, with the old and the new plan.
    """

    plan: Plan
    schedule: str
    before: float
    after: float

    @property
    def is_faster(self) -> bool:
        """Whether the new plan is predicted to be faster, by more than rounding."""
        return self.after < self.before * (1 - 1e-9)


@dataclass(frozen=True)
class Trial:
    """A new plan that runs until it is measured.

    ``before`` are the measured seconds of an iteration with the ``old`` plan.
    """

    old: Installed
    before: float


@dataclass(frozen=True)
class Tried:
    """The result of a trial.

    ``before`` and ``after`` are measured seconds of an iteration, with the old and the new plan.
    """

    before: float
    after: float

    @property
    def is_faster(self) -> bool:
        """Whether the new plan was faster, and stays."""
        return self.after < self.before


def replan(
    plan_with: PlanWith, state: TrainState, costs: Costs, measured: Sequence[Timeline]
) -> tuple[Replanned, Trial | None]:
    """Make a plan with measured costs. If it is predicted to be faster, begin a trial of it.

    Every rank calls this between two iterations. Rank 0 plans for all ranks, so all ranks have the
    same plan even if their machines differ. Stages and layers stay on their ranks.

    ``costs`` are seconds by rank and chunk, and ``measured`` are iterations of the plan that runs
    now. Both are the same on every rank.

    Returns:
        The new plan, and its trial if it runs from the next iteration on.
    """
    pipeline, world = state.pipeline, state.groups.world
    run_plan = world.all_gather_object(plan_with(costs) if world.rank == 0 else None)[0]
    assert run_plan is not None
    plan, schedule = run_plan.plan, run_plan.schedule
    before = simulate(pipeline.train_program, costs).end
    after = simulate(pipeline.training_program(plan, costs), costs).end
    own = Replanned(plan, schedule, before, after)
    found = world.all_gather_object(own)[0]
    if not found.is_faster:
        return found, None
    return found, Trial(pipeline.replace_plan(found.plan, costs), _iteration_time(measured))


def end_trial(trial: Trial, state: TrainState, measured: Sequence[Timeline]) -> Tried:
    """Keep the faster of two measured plans; every rank calls it between two iterations.

    ``measured`` are iterations of the new plan, the same on every rank.
    """
    tried = Tried(trial.before, _iteration_time(measured))
    slower = trial.old if tried.is_faster else state.pipeline.put_back(trial.old)
    state.pipeline.let_go(slower)
    return tried


def _iteration_time(timelines: Sequence[Timeline]) -> float:
    """Return the median time from the start of the first pass to the end of the last, in s."""
    return median(
        max(span.end for span in timeline.spans) - min(span.start for span in timeline.spans)
        for timeline in timelines
    )


def describe_replanned(found: Replanned) -> str:
    """Return the log line on a plan from measured costs."""
    before, after = _ms(found.before), _ms(found.after)
    if found.is_faster:
        return (
            f"replan: predicted passes of an iteration {before} before, {after} with the new plan "
            f"({found.schedule}); it is measured next"
        )
    return (
        f"replan: the plan stays: predicted passes of an iteration {before}, {after} with a new "
        f"one ({found.schedule})"
    )


def describe_tried(tried: Tried) -> str:
    """Return the log line on the result of a trial."""
    result = "the new plan stays" if tried.is_faster else "the old plan is back"
    return (
        f"replan: measured passes of an iteration {_ms(tried.before)} before, "
        f"{_ms(tried.after)} with the new plan: {result}"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def describe_costs(costs: Costs) -> str:
    """Return every cost's mean over ranks and chunks, for the log."""
    times: list[tuple[str, float]] = [
        *((kind, mean(_flat(time))) for kind, time in costs.passes.items()),
        *((kind, mean(_flat(time))) for kind, time in costs.comms.items()),
        *((kind, mean(own.times)) for kind, own in costs.exchanges.items()),
    ]
    return ", ".join(f"{kind} {seconds * 1e3:.3g} ms" for kind, seconds in times)


def save_measured(state: TrainState, costs: Costs, path: Path) -> str | None:
    """Write the measured costs, and the layers of the measured stages; every rank calls it.

    ``--measured-costs`` of training and of ``tools/simulate.py`` reads them.

    Returns:
        On rank 0, the reason why the costs could not be written, for the log. ``None`` if they were
        written, and on all other ranks.
    """
    layers = state.groups.pipeline.all_gather_object(
        list(map(len, state.pipeline.model.placement.chunks))
    )
    if state.groups.world.rank != 0:
        return None
    return why_unwritten("--save-measured-costs", lambda: save_costs(path, costs, layers))


def _flat(time: Time) -> Iterator[float]:
    if isinstance(time, (int, float)):
        yield time
        return
    for part in time:
        yield from _flat(part)
