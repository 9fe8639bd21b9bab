"""Predicted iterations of docs/reference/published_2026.csv: of their own program, and of ours.

Both have the layout, the schedule and the layers of the row. *Ours* is what a dry run of this
project says. The *source's* program is Megatron-LM (NeMo, Megatron-Bridge): it launches our kernels
with the differences of ``transformer_engine.py``, among them that collectives of tensor ranks run
beside products. So the error of the source's program is that of the model of time, and the
difference of both is what this program does or waits for and that one does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from megatron.planning.count.run import count_ranks
from megatron.planning.forecast_run import forecast_run
from megatron.planning.planned_run import RunPlan
from megatron.planning.run_costs import cluster_of
from megatron.planning.run_request import prepared
from megatron.run.command_line import parse
from megatron.run.run_config import RunConfig
from megatron.schedules.make_plan import make_plan
from megatron.schedules.plan import Plan, plan_of_one
from megatron.simulator.costs.cluster import Cluster
from megatron.simulator.costs.count import PassCount, RankCount, Work
from tools.predictions.shared_runs import SharedRun
from tools.predictions.transformer_engine import as_transformer_engine


@dataclass(frozen=True)
class SharedPrediction:
    """The predictions of a row.

    Attributes:
        run: the row.
    """

    run: SharedRun

    @property
    def error(self) -> float:
        """Predicted time of the source's program over the measured time, minus 1."""
        return self.source / self.run.seconds - 1

    @property
    def gap(self) -> float:
        """Predicted time of this program over that of the source's program, minus 1."""
        return self.ours / self.source - 1

    @cached_property
    def source(self) -> float:
        """Predicted seconds of an iteration of the source's program."""
        return self._seconds(self.source_counts)

    @cached_property
    def ours(self) -> float:
        """Predicted seconds of an iteration of this program."""
        return self._seconds(self.counts)

    @cached_property
    def config(self) -> RunConfig:
        """The run with the flags of the row."""
        run = self.run
        world = run.tensor * run.pipeline * run.context
        return parse(run.flags.split(), world_size=world, speak=False)

    @cached_property
    def plan(self) -> RunPlan:
        """Megatron-LM's plan: the passes in the order of the schedule's block."""
        request, layers = prepared(self.config, self.run.schedule, None)
        run = self.run
        plan = _of_block(run.schedule, run.pipeline, run.microbatches, request.chunks)
        return RunPlan.of(self.config, request, layers, plan)

    @cached_property
    def counts(self) -> Sequence[RankCount]:
        """The work of every pipeline rank of this program."""
        return count_ranks(self.config, plan_of_one(self.plan.plan), self.plan.layers)

    @cached_property
    def source_counts(self) -> Sequence[RankCount]:
        """The work of every pipeline rank of the source's program."""
        looks = self.run.looks_for_scales
        return [as_megatron_lm(count, looks=looks) for count in self.counts]

    @cached_property
    def cluster(self) -> Cluster:
        """GPUs and links."""
        return cluster_of(self.config.parallel, self.run.gpu)

    def _seconds(self, counts: Sequence[RankCount]) -> float:
        run, gpu = self.config, self.run.gpu
        found = forecast_run(run, self.plan, gpu, self.cluster, free=True, counts=counts)
        return found.outcome.seconds  # no vocabulary is split, so none of its collectives is free


@lru_cache(1)
def _of_block(schedule: str, ranks: int, microbatches: int, chunks: int | None) -> Plan:
    """Return a plan in the order of its block: rows that differ in replicas share it."""
    return make_plan(schedule, "none", ranks, microbatches, chunks=chunks, shortened=False)


def as_megatron_lm(count: RankCount, *, looks: bool) -> RankCount:
    """Return the count of a rank as Megatron-LM launches its passes.

    Args:
        count: of this program.
        looks: as in ``as_transformer_engine``.
    """
    known: dict[int, Work] = {}

    def changed(own: PassCount) -> PassCount:
        for work, _ in own.parts:
            if id(work) not in known:
                known[id(work)] = as_transformer_engine(work, looks=looks)
        return replace(own, parts=tuple((known[id(work)], times) for work, times in own.parts))

    return replace(count, passes={key: changed(own) for key, own in count.passes.items()})
