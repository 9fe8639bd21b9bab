"""Notes on a simulation: flags without effect, costs that are missing, costs that nothing takes."""

from collections.abc import Iterator, Sequence

from megatron.schedules.passes import PASS_KINDS
from megatron.schedules.request import Request
from megatron.simulator.costs.cost_file import DEFAULT_COSTS
from megatron.simulator.scenario import Scenario, Simulation


def notes(scenario: Scenario, done: Simulation) -> Iterator[str]:
    """Yield the notes on the simulation ``done`` of ``scenario``, a line each."""
    request, layer = scenario.request, scenario.output_layer
    alike = all(isinstance(time, (int, float)) for time in request.costs.passes.values())
    if request.treatment.redistributed and not layer and alike:
        yield (
            f"--vocab-parallel {request.vocabulary} spreads the layers by what the output layer "
            "takes, and that is nothing here, so this is 'none': add --output-layer TIME, or the "
            "costs of every rank (--cost F=TIME:TIME:..., --measured-costs)"
        )
    yield from _free_passes(done)
    yield from _free_barriers(request, done)
    yield from _idle_costs(request)


def _free_passes(done: Simulation) -> Iterator[str]:
    """Yield a line on kinds of passes of the plan that take no time, as their costs are missing.

    IF and IB alone are no reason for a line: a lookup takes little, and assumed costs have none.
    """
    timed = {span.kind for span in done.timeline.spans if span.end > span.start}
    planned = {span.kind for span in done.timeline.spans}
    free = [kind for kind in PASS_KINDS if kind in planned - timed]
    if not set(free) <= {"IF", "IB"}:
        whole = ", or --output-layer TIME for S and T together" if {"S", "T"} & set(free) else ""
        yield (
            f"{_listed(free)} take no time, as these costs have none for them: add "
            f"{','.join(f'{kind}=TIME' for kind in free)} to --cost{whole}"
        )


def _free_barriers(request: Request, done: Simulation) -> Iterator[str]:
    """Yield a line on collectives of the vocabulary that are free beside others that are not."""
    comms = request.costs.comms
    barriers = [barrier.kind for barrier in request.treatment.barriers]
    free = [kind for kind in barriers if not comms.get(kind)]
    if free and any(comms.values()) and done.plan.ranks > 1:
        yield (
            f"{_listed(free)} of the output layer: no time, though other communication has a time: "
            f"add {','.join(f'{kind}=TIME' for kind in free)} to --cost"
        )


def _idle_costs(request: Request) -> Iterator[str]:
    """Yield a line on given times of the output layer that no pass of the plan takes."""
    costs = request.costs
    idle = [kind for kind in ("S", "E", "T") if costs.passes.get(kind)]
    if idle and not request.treatment.is_sharded and costs != DEFAULT_COSTS:
        yield (
            f"--vocab-parallel {request.vocabulary} has no passes {_listed(idle)}, so their times "
            "count for nothing: --output-layer TIME adds the output layer to the last stage"
        )


def _listed(kinds: Sequence[str]) -> str:
    """Return ``S, E and T``."""
    return " and ".join([*filter(None, [", ".join(kinds[:-1])]), kinds[-1]])
