"""The costs of a run's plan: the count of its code, priced for the job's GPUs and links."""

from collections.abc import Sequence
from dataclasses import replace

from megatron.parallel.grid import AxisName
from megatron.planning.count.run import count_layers, count_ranks
from megatron.run.parallel_config import ParallelConfig
from megatron.run.run_config import RunConfig
from megatron.schedules.costs import Costs
from megatron.schedules.passes import CHUNKED_KINDS, Pass, PassKind
from megatron.schedules.plan import Plan
from megatron.simulator.costs.cluster import Cluster, SpreadAxis
from megatron.simulator.costs.count import NO_WORK
from megatron.simulator.costs.counted_costs import (
    BY_FLOPS,
    OF_EXPERTS,
    Crossing,
    Price,
    costs_of,
)
from megatron.simulator.costs.gpus import Gpu
from megatron.simulator.costs.stage_costs import StageCosts

_AXES: dict[SpreadAxis, AxisName] = {
    "tensor": "tensor",
    "context": "context",
    "context_heads": "context_heads",
    "context_ring": "context_ring",
    "column": "pipeline",
    "data": "data",
    "experts": "experts",
    "expert_tensor": "expert_tensor",
}


def cluster_of(parallel: ParallelConfig, gpu: Gpu) -> Cluster:
    """Return the GPUs of a job and the links between them."""
    together = {axis: parallel.domains.together(name) for axis, name in _AXES.items()}
    blocks: dict[SpreadAxis, int] = {"column": parallel.nccl_blocks.nccl_max_ctas_vocab}
    host = parallel.offload.bandwidth or gpu.host
    return Cluster(gpu.rates, parallel.cluster.links(gpu), together, blocks=blocks, host=host)


def crossing_of(parallel: ParallelConfig) -> Crossing:
    """Return the pairs of pipeline ranks that no link connects, if machines are known."""
    return frozenset() if parallel.gpu is None else parallel.domains.crossing


def price_of(parallel: ParallelConfig) -> Price:
    """Return the price by which plans are made: seconds on known GPUs, FLOPs on others."""
    return BY_FLOPS if parallel.gpu is None else cluster_of(parallel, parallel.gpu)


def hidden_axes(parallel: ParallelConfig) -> tuple[str, ...]:
    """Return the axes at whose collectives pairs switch; without pairs, the axes of experts."""
    return parallel.pairs.axes or OF_EXPERTS


def planned_costs(config: RunConfig, plan: Plan, layers: Sequence[int]) -> Costs:
    """Return the costs by which passes are placed.

    The plan has one microbatch.
    """
    parallel = config.parallel
    counts = count_ranks(config, plan, layers)
    return costs_of(counts, plan, price_of(parallel), crossing_of(parallel), hidden_axes(parallel))


def layers_alone(config: RunConfig, plan: Plan) -> StageCosts:
    """Return the costs of the transformer layers, with W and R as passes of their own.

    No stage has other work, nothing is sent, and no rank is counted as a whole.

    Args:
        config: the run.
        plan: a plan of one microbatch, which is whole.
    """
    apart = _with_all_passes(plan, recomputes=config.train.recomputation.group > 0)
    price, planned = price_of(config.parallel), {item.kind for item in apart.rows[0]}
    kinds = [kind for kind in CHUNKED_KINDS if kind in planned]
    segments = count_layers(config, apart)
    different = {id(segment): segment.passes for segment in segments}
    of_layers: dict[PassKind, list[float]] = {}
    for kind in kinds:
        times = {n: price.seconds(own.get(kind, NO_WORK)) for n, own in different.items()}
        of_layers[kind] = [times[id(segment)] for segment in segments]
    longest = {kind: max(times) for kind, times in of_layers.items()}
    return StageCosts(
        plan.stages,
        longest,
        [{} for _ in plan.stages],
        {},
        plan.treatment,
        weights={
            kind: [time / longest[kind] for time in times]
            for kind, times in of_layers.items()
            if len(set(times)) > 1
        },
    )


def stage_costs(config: RunConfig, plan: Plan, layers: Sequence[int]) -> StageCosts:
    """Return costs for any distribution of the layers, with W and R as passes of their own.

    ``plan`` has one microbatch, which is whole. ``layers`` is the distribution from which the costs
    are counted; the run may have another.
    """
    alone = layers_alone(config, plan)
    apart = _with_all_passes(plan, recomputes=config.train.recomputation.group > 0)
    costs = planned_costs(config, apart, layers)
    others = {kind: time for kind, time in costs.passes.items() if kind not in alone.layer}
    found = replace(alone, others=others, comms=costs.comms)
    return replace(found, extras=_extras(found, costs, layers))


def _extras(found: StageCosts, costs: Costs, layers: Sequence[int]) -> list[dict[PassKind, float]]:
    """Return the time of every stage's work in addition to its layers."""
    extras: list[dict[PassKind, float]] = [{} for _ in found.stages]
    for kind, longest in found.layer.items():
        worth = found.weighed(kind, layers)
        for extra, (rank, chunk), count in zip(extras, found.stages, worth, strict=True):
            extra[kind] = max(0.0, costs.time(kind, rank, chunk) - count * longest)
    return extras


def _with_all_passes(plan: Plan, *, recomputes: bool) -> Plan:
    """Return a plan of one microbatch with W and R as passes of their own."""
    own: set[PassKind] = {"W"} if plan.split_backward else set()
    if plan.recomputes:
        own.add("R")

    def passes(item: Pass) -> list[Pass]:
        if item.kind != "B":
            return [item]
        before = [item._replace(kind="R")] if recomputes and "R" not in own else []
        return [*before, item, *([] if "W" in own else [item._replace(kind="W")])]

    rows = tuple(tuple(made for item in row for made in passes(item)) for row in plan.rows)
    return replace(plan, rows=rows)
