"""Gives all ranks the plan of rank 0, where searches of several ranks may end differently."""

import json
from dataclasses import asdict

from megatron.schedules.costs import Costs, Exchange
from megatron.schedules.plan import Plan
from megatron.training.planning.planned_run import RunPlan
from megatron.training.rendezvous import Rendezvous

_KEY = "plan of rank 0"


def shared_plan(rendezvous: Rendezvous, own: RunPlan) -> RunPlan:
    """Return the plan that rank 0 has found, on all ranks; call it once in a job.

    Args:
        rendezvous: where the ranks have met.
        own: the plan that this rank has found.
    """
    if rendezvous.rank == 0:
        rendezvous.store.set(_KEY, to_json(own))
    return from_json(rendezvous.store.get(_KEY).decode())


def to_json(run_plan: RunPlan) -> str:
    """Return a plan with its layers and costs as text."""
    costs = run_plan.costs
    return json.dumps(
        {
            "plan": run_plan.plan.to_text(),
            "schedule": run_plan.schedule,
            "treatment": run_plan.treatment,
            "layers": run_plan.layers,
            "passes": dict(costs.passes),
            "comms": dict(costs.comms),
            "exchanges": {kind: asdict(own) for kind, own in costs.exchanges.items()},
        }
    )


def from_json(text: str) -> RunPlan:
    """Return the plan that ``to_json`` wrote."""
    found = json.loads(text)
    exchanges = {kind: Exchange(**own) for kind, own in found["exchanges"].items()}
    costs = Costs(found["passes"], found["comms"], exchanges)
    plan = Plan.from_text(found["plan"])
    return RunPlan(plan, tuple(found["layers"]), costs, found["schedule"], found["treatment"])
