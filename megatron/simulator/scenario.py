"""A scenario, from the request to the result: make the plan, lower it and simulate it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from megatron.schedules.costs import Costs
from megatron.schedules.held import in_flight
from megatron.schedules.lower import Program, lower
from megatron.schedules.make_plan import find_plan, stages_of
from megatron.schedules.needs import CommKind
from megatron.schedules.plan import Plan
from megatron.schedules.request import Request
from megatron.schedules.search.watch import Watch
from megatron.schedules.slice_lengths import SliceStrategy, causal_work, slice_lengths
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.output_layer_costs import (
    place_output_layer,
    redistribute_layers,
    spread_output_layer,
)
from megatron.simulator.costs.peak_bytes import check_counts
from megatron.simulator.exchange import EvenBuckets, Hidden, hidden
from megatron.simulator.segments import with_segments
from megatron.simulator.simulate import Timeline, simulate

LAYERS_PER_STAGE: Final = 4
"""Transformer layers of each stage for ``redis``, if the model's number of layers is not given."""


_LONG: Final = 1 << 20
"""Tokens of a slice where the sequence is not known: so many that rounding does not matter."""


@dataclass(frozen=True)
class Scenario:
    """The input of a simulation.

    Attributes:
        request: the wanted plan, with its costs. For ``redis``, costs that are equal on all ranks
            count as the costs of an even distribution of the layers.
        output_layer: time of the forward of the whole output layer. The times of its passes are
            computed from it and added to the costs. By default no output layer is added: S and T
            take their times from the costs, and without S and T the costs hold as they are.
        layers: transformer layers of the model, for ``redis``; by default 4 per stage.
        last_stage_layers: layers of the last stage, for ``redis``; by default they are balanced.
        replicas: number of replicas of the pipeline.
        buckets: the buckets that the replicas exchange. The costs have the times of U, RG and AG.
        vocab_recompute: whether the output layer's backward computes the logits again.
        attention: share of the time of F, R and B that causal attention takes. If microbatches are
            cut into slices, later slices take longer because of it.
        slices: whether slices have equal lengths or equal times.
    """

    request: Request
    output_layer: float | None = None
    layers: int | None = None
    last_stage_layers: int | None = None
    replicas: int = 1
    buckets: EvenBuckets | None = None
    vocab_recompute: bool = False
    attention: float = 0.0
    slices: SliceStrategy = "uniform"


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation.

    Attributes:
        program: the simulated program.
        schedule: the name of the plan's schedule; for ``auto``, the schedule that ``auto`` has
            chosen.
        timeline: the program's timeline.
        in_flight: for every rank, its peak of microbatches in flight, counted as in the schedule's
            promise.
        bound: a proven time that no plan within the limit can beat; ``None`` unless ``optimal`` has
            proven it.
        hidden: how much of the exchange with replicas the passes hide, by kind.
    """

    program: Program
    schedule: str
    timeline: Timeline
    in_flight: Sequence[float]
    bound: float | None = None
    hidden: Mapping[CommKind, Hidden] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.program.plan


def run(scenario: Scenario, watch: Watch | None = None) -> Simulation:
    """Make the plan of ``scenario`` and simulate it; ``watch`` ends and shows the search.

    Raises:
        ValueError: if ``find_plan`` raises ``ValueError``, if the costs are for other ranks or
            chunks, or if an option does not apply to the treatment of the vocabulary.
    """
    _check(scenario.request.costs, scenario.request.ranks)
    request = replace(scenario.request, costs=_in_slices(scenario, _costs(scenario)))
    plan, schedule, bound = find_plan(request, watch)
    costs = request.costs
    if request.traits.compares:
        costs = costs.per_chunk(plan.chunks)
    _check(costs, plan.ranks, plan.chunks)
    program = lower(plan, costs)
    kept: Mapping[CommKind, Hidden] = {}
    if scenario.buckets is not None:
        program = scenario.buckets.added_to(program)
        kept = hidden(program, costs)
    timeline = with_segments(simulate(program, costs), plan, costs)
    if not timeline.end:
        raise ValueError("nothing takes time: give some pass a time above 0")
    held = in_flight(plan, request.traits.kept)
    return Simulation(program, schedule, timeline, held, bound, kept)


def _costs(scenario: Scenario) -> Costs:
    """Return the costs of ``scenario`` with its output layer."""
    request, time = scenario.request, scenario.output_layer
    costs, treatment = request.costs, TREATMENTS[request.vocabulary]
    if request.recompute_ahead is not None:  # R has no part of the output layer
        costs = replace(costs, passes={"R": costs.passes["F"], **costs.passes})
    redistributed = scenario.layers is not None or scenario.last_stage_layers is not None
    if redistributed and not treatment.redistributed:
        raise ValueError(
            f"the treatment '{request.vocabulary}' leaves the layers evenly spread: take 'redis' "
            "to give their number, or that of the last stage"
        )
    if time is None and not redistributed:
        return costs
    again = scenario.vocab_recompute
    if treatment.is_sharded:
        assert time is not None
        return spread_output_layer(costs, request.ranks, treatment, time, recompute=again)
    stages = stages_of(request)
    if not treatment.redistributed:
        return place_output_layer(costs, stages, time or 0.0, recompute=again)
    layers = LAYERS_PER_STAGE * len(stages) if scenario.layers is None else scenario.layers
    last = scenario.last_stage_layers
    return redistribute_layers(costs, stages, layers, time or 0.0, last, recompute=again)


def _in_slices(scenario: Scenario, costs: Costs) -> Costs:
    """Return the costs with those of every slice, if slices differ."""
    n, share = scenario.request.slices, scenario.attention
    if n == 1 or not share:
        return costs
    length = _LONG * n
    lengths = slice_lengths(length, n, scenario.slices, causal_work(length, share))
    return costs.in_slices(lengths, dict.fromkeys(("F", "R", "B"), share))


def _check(costs: Costs, ranks: int, chunks: int | None = None) -> None:
    for kind, exchange in costs.exchanges.items():
        check_counts(kind, "time", exchange.times, ranks)
    for name, time in costs.passes.items():
        check_counts(name, "time", time, ranks, chunks)
