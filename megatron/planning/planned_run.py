"""The plan that the ranks of a run execute, and the assumptions behind it."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from megatron.run.run_config import RunConfig
from megatron.schedules.costs import Costs
from megatron.schedules.lower import Program, lower
from megatron.schedules.plan import Plan
from megatron.schedules.request import Request


@dataclass(frozen=True)
class RunPlan:
    """A plan with the layers and costs for which it was made.

    Attributes:
        plan: the checked plan of a training iteration.
        layers: transformer layers of every stage, in the order in which the data flows.
        costs: durations by which passes and communication were placed.
        schedule: the schedule of the plan; under ``auto`` the schedule that was chosen.
        taken: the words of the alternative of the run for which the plan was made; empty: the run
            left nothing to its plan.
        limits: the most microbatches that each rank may have in flight, where a percentage of
            memory limits them; else empty.
    """

    plan: Plan
    layers: tuple[int, ...]
    costs: Costs
    schedule: str
    taken: tuple[str, ...] = ()
    limits: tuple[float, ...] = ()

    @cached_property
    def program(self) -> Program:
        """The program of ``plan``, without the work that replicas share."""
        return lower(self.plan, self.costs)

    def __getstate__(self) -> dict[str, Any]:
        """Return what other ranks are sent: they derive the program themselves."""
        return {own.name: getattr(self, own.name) for own in fields(self)}

    @classmethod
    def of(
        cls, config: RunConfig, request: Request, layers: tuple[int, ...], plan: Plan
    ) -> "RunPlan":
        """Return ``plan`` with the layers and costs for which it was made.

        The plan may have fewer microbatches than ``request``.
        """
        plan = replace(
            plan,
            ahead_stage=config.ahead_stage(len(plan.stages)),
            offloaded=min(config.parallel.offload.chunks, plan.chunks),
        )
        by_memory = config.parallel.planning.is_limited_by_memory
        limits = request.limits if by_memory else ()
        return cls(plan, layers, request.costs, request.schedule, config.taken, limits)
