"""Makes a new plan from the measured costs of real iterations while the run goes on."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from megatron.schedules.costs import Costs, Time
from megatron.schedules.lower import lower
from megatron.schedules.plan import Plan
from megatron.simulator.costs.cost_file import save_costs
from megatron.simulator.simulate import simulate
from megatron.training.setup import TrainState

PlanWith = Callable[[Costs], Plan]
"""Returns the run's plan for measured costs; its stages stay where they are."""


@dataclass(frozen=True)
class Replanned:
    """The result of planning with measured costs.

    Attributes:
        plan: the new plan.
        before: predicted time of an iteration as it runs now, in seconds.
        after: predicted time of an iteration of ``plan``.
    """

    plan: Plan
    before: float
    after: float

    @property
    def is_faster(self) -> bool:
        """Whether the new plan is predicted to be faster, by more than rounding."""
        return self.after < self.before * (1 - 1e-9)


def replan(plan_with: PlanWith, state: TrainState, costs: Costs) -> Replanned:
    """Plan with measured costs, and run that plan from the next iteration on if it is faster.

    Every rank calls it between two iterations. Rank 0 plans for all ranks, so that all have the
    same plan even on unlike machines. Stages and layers stay where they are.

    Args:
        plan_with: makes a plan from measured costs.
        state: this rank.
        costs: in seconds, by rank and chunk, the same on every rank.
    """
    pipeline, groups = state.pipeline, state.groups
    found = _plan(plan_with, state, costs) if groups.world.rank == 0 else None
    found = groups.world.all_gather_object(found)[0]
    assert found is not None
    if found.is_faster:
        pipeline.replace_plan(found.plan, costs)
    return found


def _plan(plan_with: PlanWith, state: TrainState, costs: Costs) -> Replanned:
    plan = plan_with(costs)
    return Replanned(
        plan,
        before=simulate(state.pipeline.train_program, costs).end,
        after=simulate(lower(plan, costs), costs).end,
    )


def describe_replanned(found: Replanned) -> str:
    """Return the log line on the result."""
    before, after = f"{found.before * 1e3:.1f} ms", f"{found.after * 1e3:.1f} ms"
    if found.is_faster:
        return f"replan: predicted iteration {before} before, {after} with the new plan"
    return f"replan: the plan stays: predicted iteration {before}, {after} with a new one"


def describe_costs(costs: Costs) -> str:
    """Return every cost's mean over ranks and chunks, for the log."""
    times = {kind: mean(_flat(time)) for kind, time in costs.passes.items()} | dict(costs.comms)
    return ", ".join(f"{kind} {seconds * 1e3:.3g} ms" for kind, seconds in times.items())


def save_measured(state: TrainState, costs: Costs, path: Path) -> None:
    """Write the measured costs, and the layers of the measured stages; every rank calls it.

    ``--measured-costs`` of training and of ``tools/simulate.py`` reads them.
    """
    layers = state.groups.pipeline.all_gather_object(
        list(map(len, state.pipeline.model.placement.chunks))
    )
    if state.groups.world.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_costs(path, costs, layers)


def _flat(time: Time) -> Iterator[float]:
    if isinstance(time, (int, float)):
        yield time
        return
    for part in time:
        yield from _flat(part)
