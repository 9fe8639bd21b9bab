"""From a configuration to the plan of a training iteration, which is the same on every rank.

The schedule decides the number of stages. The number of stages decides how many layers each stage
has. The layers decide the costs of the passes, and the costs decide the order of the passes. So no
other rank is needed, and an impossible plan is refused before the ranks meet.
"""

from collections.abc import Sequence
from math import inf
from typing import Final

import torch

from megatron.planning.alternatives import Compared
from megatron.planning.candidate import Candidate
from megatron.planning.planned_run import RunPlan
from megatron.planning.race import chosen
from megatron.planning.run_request import prepared, runs_on
from megatron.run.run_config import RunConfig
from megatron.schedules.catalogue import TRAITS, compared_schedules
from megatron.schedules.costs import Costs
from megatron.schedules.counted import counted
from megatron.schedules.held import in_flight
from megatron.schedules.make_plan import as_compared
from megatron.schedules.search.watch import Watch
from megatron.simulator.costs.gpus import Gpu

COMPARISON_SECONDS: Final = 20.0
"""Seconds of work of each step of a comparison on a GPU without ``--search-seconds``
(``Compared.choose``)."""


def described(asked: str, run_plan: RunPlan) -> str:
    """Return the asked schedule in words; if it compares others (``auto``), with its choice."""
    if not TRAITS[asked].compares:
        return asked
    held = counted(max(in_flight(run_plan.plan)), "microbatch in flight")
    return f"{run_plan.schedule} (taken by {asked}; up to {held})"


def make_run_plan(
    config: RunConfig,
    costs: Costs | None = None,
    watch: Watch | None = None,
    seconds: float | None = None,
    *,
    checks: bool = True,
) -> RunPlan:
    """Return the plan of a training iteration.

    Args:
        config: the run.
        costs: costs by rank and chunk, measured on the stages of the plan of ``config``. The new
            plan leaves all layers on their ranks. ``None``: costs are counted, or read from the
            file of ``--measured-costs``.
        watch: ends the search when its time is up, and shows how far it is.
        seconds: of work to compare schedules on a GPU, if ``watch`` has no limit.
        checks: whether to refuse a plan that exceeds the limit by memory.

    Raises:
        ValueError: the layers cannot be spread over the stages, the schedule cannot be made, or
            no schedule fits into the memory limit, or the plan exceeds the limit by memory.
    """
    found = all_compared(config, costs, watch, seconds)
    first = found.choose(seconds) if compares(config) else found.candidates[0]
    if (
        checks and costs is None
    ):  # measured costs change the order of passes in a run that has begun
        first.check_memory_limit()
    return first.run_plan


def compares(config: RunConfig) -> bool:
    """Whether a run leaves its schedule, or a dimension of ``run/choices.py``, to its plan."""
    return bool(config.alternatives) or TRAITS[config.parallel.pipeline_schedule].compares


def only_rank_0_plans(config: RunConfig) -> bool:
    """Whether one rank searches for the plan of a start, and all ranks take that plan.

    With a limit of time, the plan depends on how fast a machine searches. A comparison of plans by
    their seconds on a GPU has the same result on every machine, but takes many seconds of a core.
    A memory that no data sheet tells may differ between machines, and a limit by memory with it.
    Which ranks know their GPU must not matter here: else some ranks would wait for a plan that
    nobody sends.
    """
    limited = config.parallel.planning.search_seconds is not None
    long = compares(config) and _gpu(config, None) is not None
    return limited or long or config.parallel.planning.is_limited_by_memory


def asked(
    config: RunConfig, costs: Costs | None = None, watch: Watch | None = None
) -> list[Candidate]:
    """Return the candidates of ``all_compared``, with no other limit than the watch's."""
    return all_compared(config, costs, watch).candidates


def all_compared(
    config: RunConfig,
    costs: Costs | None = None,
    watch: Watch | None = None,
    seconds: float | None = None,
) -> Compared:
    """Return the candidates of a run, bounded if a run on a GPU has many alternatives.

    The arguments are as for ``make_run_plan``. Alternatives that change more than the treatment of
    the vocabulary are looked at for half of the time, those with the fewest changes first, or for
    all of it if none can fit. Without a known GPU they are left out: FLOPs cannot compare them.

    Raises:
        ValueError: the layers cannot be spread over the stages.
    """
    watch = Watch() if watch is None else watch
    several = _comparable(config, costs)
    runs = [config.taking(own) for own in several] or [config]
    found = Compared(runs, lambda run: _asked(run, costs, watch), watch)
    found.look(sum(not own.changes for own in several), seconds)
    if compares(config):
        watch.expect(len(found.candidates))
    return found


def _comparable(config: RunConfig, costs: Costs | None) -> list[RunConfig]:
    """Return the alternatives that can be compared: by FLOPs, only those without changes."""
    known = _gpu(config, costs) is not None
    return [own for own in config.alternatives if known or not own.changes]


def _asked(config: RunConfig, costs: Costs | None, watch: Watch) -> list[Candidate]:
    """Return the candidates of a run that leaves at most its schedule to its plan.

    If the run is one of several alternatives, and its plan exceeds the limit of microbatches in
    flight, another alternative is taken, as ``auto`` takes another schedule.
    """
    name, limit = config.parallel.pipeline_schedule, inf
    if TRAITS[name].compares:
        return candidates(config, costs, watch)
    request, layers = prepared(config, name, costs)
    if config.taken and config.parallel.planning.memory_limit is not None:
        request, limit = (
            as_compared(request),
            config.parallel.planning.memory_limit,
        )
    return [Candidate(config, request, layers, limit, watch, _gpu(config, costs))]


def candidates(
    config: RunConfig,
    costs: Costs | None = None,
    watch: Watch | None = None,
    names: Sequence[str] | None = None,
) -> list[Candidate]:
    """Return all schedules that the run could take, each with its own stages, layers and costs.

    A schedule is left out if the layers cannot be spread over its stages. With ``costs``, a
    schedule is also left out if its stages are not where the costs were measured.

    The schedule that ``config`` names does not matter, but its treatment of the vocabulary must be
    decided. ``costs`` are as for ``make_run_plan`` with the schedule ``auto``. ``names`` are the
    schedules to look at; ``None``: all.

    Raises:
        ValueError: all schedules are left out; the message has the reason of the first.
    """
    watch = Watch() if watch is None else watch
    measured = None if costs is None else chosen(candidates(config)).run_plan.plan
    limit = (
        inf
        if config.parallel.planning.memory_limit is None
        else config.parallel.planning.memory_limit
    )
    gpu = _gpu(config, costs)
    found, faults = [], []
    for name in names or _compared_schedules(config):
        try:
            request, layers = prepared(config, name, costs)
        except ValueError as error:
            faults.append(f"{name}: {error}")
            continue
        if measured is None or runs_on(request, measured):
            found.append(Candidate(config, request, layers, limit, watch, gpu))
    if not found:
        asked = config.parallel.pipeline_schedule
        raise ValueError(
            f"--pipeline-schedule {asked}: no schedule can train this model; {faults[0]}"
        )
    return found


def _compared_schedules(config: RunConfig) -> tuple[str, ...]:
    planning = config.parallel.planning
    return compared_schedules(inf if planning.is_limited_by_memory else planning.memory_limit)


def _gpu(config: RunConfig, costs: Costs | None) -> Gpu | None:
    """Return the GPU by whose seconds plans are compared.

    ``None``: costs are measured, or the run is in fp32, for which no GPU's rates are known.
    """
    measured = costs is not None or config.train.dtype == torch.float32
    return None if measured else config.parallel.gpu
