"""Predicts the same job with another treatment of the vocabulary, from passes that it has measured.

A job with a split vocabulary is compared with the job whose first and last stage hold the whole
vocabulary layers, and the other way round. Only the treatment differs: schedule, layers,
microbatches and machine are those of the job, and the plan is the one that the other job would run.
Both jobs are simulated with the same measured times, so what the simulator does not know of the
machine is left out of both.
"""

from dataclasses import dataclass, replace
from typing import Final

from megatron.model.distribution import LayerDistribution
from megatron.planning.planned_run import RunPlan
from megatron.planning.run_costs import stage_costs
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.schedules.costs import Costs
from megatron.schedules.lower import lower
from megatron.schedules.plan import Plan, plan_of_one
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.cost_file import CostFile
from megatron.simulator.costs.measured_costs import measured_costs
from megatron.simulator.costs.other_treatment import (
    on_the_ends,
    output_layer_time,
    spread_over_ranks,
)
from megatron.simulator.costs.stage_costs import StageCosts
from megatron.simulator.simulate import simulate

MOST_PASSES: Final = 20_000
"""Passes of the largest plan for which another one is made; planning takes some seconds then."""


@dataclass(frozen=True)
class Prediction:
    """A job with another treatment of the vocabulary, simulated beside the job that has run.

    Attributes:
        treatment: of the other job.
        own: seconds of the passes of an iteration of the job that has run, as simulated.
        other: the same of the other job.
        idle: share of ``other`` in which a rank runs no pass, averaged over the ranks.
        output_layer: seconds of the whole output layer for a microbatch, forward and backward.
        at_best: whether collectives of the other job are missing, so that it takes longer.
    """

    treatment: str
    own: float
    other: float
    idle: float
    output_layer: float
    at_best: bool

    def iteration(self, measured: float) -> float:
        """Return the seconds of an iteration of the other job.

        Args:
            measured: seconds of an iteration of the job that has run. Its work between the passes
                of two iterations is that of the other job too.
        """
        return measured + self.other - self.own


def predict_other(config: RunConfig, run_plan: RunPlan, plan: Plan, costs: Costs) -> Prediction:
    """Predict the job with the vocabulary on the ends if it is split, or split if it is not.

    Args:
        config: the job that has run.
        run_plan: the layers and the schedule of the job.
        plan: the plan whose passes were measured.
        costs: measured seconds by rank and chunk.

    Raises:
        ValueError: the other job cannot be predicted; the message says why.
    """
    if fault := _unpredictable(config, plan):
        raise ValueError(fault)
    known = _by_layer(config, run_plan, plan, costs)
    again = config.parallel.vocabulary.vocab_recompute
    if plan.treatment.is_sharded:
        other = on_the_ends(known, recompute=again)
    else:
        other = spread_over_ranks(known, TREATMENTS["vocab-2"], recompute=again)
    made = make_run_plan(_with_treatment(config, run_plan, other.treatment.name))
    found = other.costs(made.layers)
    timeline = simulate(lower(made.plan, made.costs), found)
    return Prediction(
        other.treatment.name,
        simulate(lower(plan, run_plan.costs), costs).end,
        timeline.end,
        timeline.idle(),
        output_layer_time(known),
        at_best=not plan.treatment.is_sharded,
    )


def _unpredictable(config: RunConfig, plan: Plan) -> str | None:
    """Return why the job with the other treatment cannot be predicted; ``None``: it can."""
    passes = sum(map(len, plan.rows))
    reasons = (
        (plan.ranks == 1, "one pipeline rank has all of the vocabulary in any case"),
        (plan.slices > 1, "passes of slices have been measured, not those of microbatches"),
        (bool(plan.offloaded), "copies to the host have no measured time"),
        (plan.ahead_stage is not None, "further predicted tokens use the output layer too"),
        (config.parallel.planning.schedule_file is not None, "the plan comes from a file"),
        (
            plan.microbatches != config.train.num_microbatches,
            "the batches have not grown to their full size",
        ),
        (passes > MOST_PASSES, f"a plan of {passes:,} passes takes long to make"),
    )
    return next((reason for holds, reason in reasons if holds), None)


def _by_layer(config: RunConfig, run_plan: RunPlan, plan: Plan, costs: Costs) -> StageCosts:
    """Return measured costs as those of a layer, of extra work, and of the vocabulary's passes."""
    table = [[0] * plan.chunks for _ in range(plan.ranks)]
    for (rank, chunk), count in zip(plan.stages, run_plan.layers, strict=True):
        table[rank][chunk] = count
    named = frozenset(costs.passes) | set(costs.comms) | set(costs.exchanges)
    assumed = stage_costs(config, plan_of_one(plan), run_plan.layers)
    return measured_costs(CostFile(costs, None, table, named), assumed)


def _with_treatment(config: RunConfig, run_plan: RunPlan, treatment: str) -> RunConfig:
    """Return the job with another treatment of the vocabulary, and the schedule that it has run.

    Layers that have made room for the vocabulary are spread evenly again.
    """
    spread = config.parallel.layers
    parallel = replace(
        config.parallel,
        treatment=config.parallel.treatment.named(treatment),
        schedule=replace(config.parallel.schedule, pipeline_schedule=run_plan.schedule),
        layers=LayerDistribution() if spread.kind == "redis" else spread,
        planning=replace(config.parallel.planning, measured_costs=None),
    )
    return replace(config, parallel=parallel, alternatives=())
