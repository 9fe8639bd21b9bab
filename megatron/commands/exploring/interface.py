"""What the explorer's page can ask: one function from JSON to JSON, of the standard library alone.

The page calls ``answer`` in the browser (Pyodide) or over HTTP (``server.py``). Both run this code,
so their numbers are those of ``tools/simulate.py``, whose ``--json`` is made here by the same
functions.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from megatron.commands.exploring.case import SHOWN_SCHEDULES, Case
from megatron.commands.exploring.model_costs import MODELS
from megatron.commands.exploring.shown import (
    bytes_over_time,
    drawing,
    microbatches_over_time,
    needs_of_first,
)
from megatron.commands.exploring.simulated import Simulated, Simulations, WatchOf
from megatron.commands.simulate_schedule import figures, heading
from megatron.commands.simulation_notes import notes
from megatron.flags.readable import readable
from megatron.schedules.catalogue import SCHEDULES, TRAITS
from megatron.schedules.costs import Costs
from megatron.schedules.held import in_flight
from megatron.schedules.needs import COMM_KINDS, HOST_KINDS, REPLICA_KINDS
from megatron.schedules.passes import PASS_KINDS
from megatron.schedules.search.watch import Watch
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.compare import compare, idle, total
from megatron.simulator.costs.gpus import GPUS
from megatron.simulator.draw.palette import COLOURS, LATER_CHUNK_OPACITY, MEANINGS
from megatron.simulator.draw.picture import Panel, lay_out
from megatron.simulator.draw.stretches import Window
from megatron.simulator.draw.svg import paint_svg
from megatron.simulator.metrics import DEFINITIONS
from megatron.simulator.simulate import Timeline
from megatron.simulator.timeline_file import load_timeline
from megatron.simulator.ways_folder import WaysFolder

COMM_NAMES: Final = (
    "p2p",
    *(kind for kind in COMM_KINDS if kind not in ("X", "G", *REPLICA_KINDS, *HOST_KINDS)),
)
"""The communications whose time the page asks for."""


class _Asked(NamedTuple):
    """A request, and the tools that answer it."""

    values: Mapping[str, Any]
    simulations: Simulations
    watch_of: WatchOf
    ways: WaysFolder | None = None

    def simulated(self, schedule: str = "") -> Simulated:
        """Return the simulation of the case, perhaps with another schedule."""
        case = Case.of_json(self.values["case"])
        return self.simulations.of(case.compared(schedule) if schedule else case, self.watch_of)


def answer(
    text: str,
    simulations: Simulations,
    watch_of: WatchOf = Watch,
    ways: WaysFolder | None = None,
) -> str:
    """Return the answer to a request, both as JSON text.

    A request that cannot be met is answered with ``{"error": message}``.

    Args:
        text: of the request.
        simulations: those of earlier requests.
        watch_of: makes the watches of searches.
        ways: ways of ``plan-pretraining`` to show; ``None``: there are none.
    """
    try:
        return json.dumps(explore(json.loads(text), simulations, watch_of, ways))
    except (ValueError, RecursionError) as error:
        return json.dumps({"error": readable(str(error))})


def explore(
    request: Mapping[str, Any],
    simulations: Simulations,
    watch_of: WatchOf = Watch,
    ways: WaysFolder | None = None,
) -> dict[str, object]:
    """Return the answer to a request, in JSON values.

    Args:
        request: ``action``, and what it is about: ``facts`` (names, colours and words),
            ``simulate`` (a ``case``), ``draw`` (a ``case`` as SVG, perhaps a ``window`` of it),
            ``point`` (a ``case`` with another ``schedule``, to be compared), ``front`` (of
            ``points``), ``recorded`` (the ``text`` of a timeline, beside a ``case``), or ``way``
            (the timeline of one of ``ways`` by its ``number``).
        simulations: those of earlier requests.
        watch_of: makes the watches of searches.
        ways: ways of ``plan-pretraining`` to show; ``None``: there are none.

    Raises:
        ValueError: the request is none, or cannot be met; the message says why.
    """
    action = request.get("action") if isinstance(request, Mapping) else None
    if not isinstance(action, str) or action not in _ACTIONS:
        raise ValueError(f"ask for one of {', '.join(_ACTIONS)}, as an object with an 'action'")
    try:
        return _ACTIONS[action](_Asked(request, simulations, watch_of, ways))
    except KeyError as error:
        raise ValueError(f"the action {action} needs {error}") from error


def _facts(asked: _Asked) -> dict[str, object]:
    return {
        "schedules": {
            name: {
                "description": TRAITS[name].description,
                "title": SCHEDULES[name].title if name in SCHEDULES else name,
                "chunks": TRAITS[name].chunks,
                "chunk_step": TRAITS[name].chunk_step,
                "split": TRAITS[name].split,
                "needs_limit": TRAITS[name].needs_memory_limit,
                "takes_split": "split_backward" in TRAITS[name].options,
                "has_block": name in SCHEDULES,
                "compares": TRAITS[name].compares,
            }
            for name in SHOWN_SCHEDULES
        },
        "treatments": {
            name: {"sharded": own.is_sharded, "barriers": [b.kind for b in own.barriers]}
            for name, own in TREATMENTS.items()
        },
        "colours": COLOURS,
        "later_chunk_opacity": LATER_CHUNK_OPACITY,
        "meanings": MEANINGS,
        "passes": PASS_KINDS,
        "comms": COMM_KINDS,
        "comm_costs": COMM_NAMES,
        "definitions": DEFINITIONS,
        "gpus": list(GPUS),
        "models": {name: asdict(job) for name, job in MODELS.items()},
        "ways": None if asked.ways is None else asked.ways.listed,
    }


def _simulate(asked: _Asked) -> dict[str, object]:
    found = asked.simulated()
    plan, timeline = found.done.plan, found.done.timeline
    kept = TRAITS[found.scenario.request.schedule].kept
    over_time = (
        microbatches_over_time(plan, timeline, kept)
        if found.model is None
        else bytes_over_time(found.done.program, timeline, found.model.memories)
    )
    return {
        "figures": figures(found.scenario, found.done, found.held),
        "heading": heading(found.scenario, found.done),
        "notes": list(notes(found.scenario, found.done)),
        "cut": found.was_cut,
        "searched": found.case.searched,
        "command": " ".join(found.command),
        "costs_file": _costs_file(found),
        "forecast": _forecast(found),
        "plan": plan.to_text(),
        "drawing": drawing(timeline),
        "needs": needs_of_first(plan),
        "memory": over_time,
    }


def _costs_file(found: Simulated) -> dict[str, object] | None:
    if found.model is None:
        return None
    costs = found.model.costs
    slices = {"slices": [_times_of(own) for own in costs.slices]} if costs.slices else {}
    return {**_times_of(costs), **slices}


def _times_of(costs: Costs) -> dict[str, object]:
    exchanges = {kind: own.times for kind, own in costs.exchanges.items()}
    return {"passes": costs.passes, "comms": {**costs.comms, **exchanges}}


def _forecast(found: Simulated) -> dict[str, object] | None:
    job, costs = found.case.model, found.model
    if job is None or costs is None:
        return None
    request, plan = found.scenario.request, found.done.plan
    replicas = found.case.replicas
    outcome = job.forecast(request, found.done.program, found.done.timeline, costs, replicas)
    tokens = found.scenario.replicas * plan.microbatches * job.batch * job.seq
    return {
        "seconds": outcome.seconds,
        "step": outcome.step,
        "mfu": outcome.mfu,
        "layers": costs.layers,
        "usable": job.device.usable,
        "tokens_per_second": tokens / outcome.seconds,
    }


def _draw(asked: _Asked) -> dict[str, object]:
    found = asked.simulated()
    panel = Panel(heading(found.scenario, found.done), found.done.timeline)
    window = Window.parse(str(asked.values.get("window") or ":"))
    unit = "" if found.model is None else "s"
    return {"svg": paint_svg(lay_out([panel], unit=unit, window=window))}


def _point(asked: _Asked) -> dict[str, object]:
    """Return the figures by which plans are compared; memory counts in full for all of them."""
    schedule = str(asked.values.get("schedule") or "")
    if schedule and schedule not in SHOWN_SCHEDULES:
        raise ValueError(f"schedule {schedule}: the page shows {', '.join(SHOWN_SCHEDULES)}")
    found = asked.simulated(schedule)
    held = found.held
    return {
        "schedule": found.scenario.request.schedule,
        "vocab": found.scenario.request.vocabulary,
        "time": found.done.timeline.end,
        "idle": found.done.timeline.idle(),
        "memory": max(in_flight(found.done.plan)) if held is None else max(held),
        "cut": found.was_cut,
    }


def _front(asked: _Asked) -> dict[str, object]:
    given = asked.values["points"]
    try:
        points = [(float(point["time"]), float(point["memory"])) for point in given]
    except (TypeError, OverflowError, KeyError, ValueError) as error:
        raise ValueError("each of 'points' needs its 'time' and its 'memory', numbers") from error
    return {"front": pareto_front(points)}


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points that no other point beats in time or memory.

    Args:
        points: (time, memory); less is better. Points that are alike are all on the front.
    """

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one != other and one[0] <= other[0] and one[1] <= other[1]

    return [i for i, own in enumerate(points) if not any(beats(other, own) for other in points)]


def _recorded(asked: _Asked) -> dict[str, object]:
    """Return a recorded timeline, compared with that of the case if both are of one plan.

    ``unit`` is one unit of the plan's time in seconds: a model's plan is in seconds; else it is
    what makes the passes of both take the same time together, so that the rest can be compared.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / "timeline.json"
        file.write_text(str(asked.values["text"]), encoding="utf-8")
        try:
            real = load_timeline(file)
        except ValueError as error:
            raise ValueError(str(error).replace(str(file), "the file")) from error
    answer: dict[str, object] = {
        "drawing": drawing(real), "total": total(real), "idle": idle(real)
    }  # fmt: skip
    try:
        found = asked.simulated()
        planned = found.done.timeline
        comparison = compare(planned, real).as_json()
    except ValueError as error:
        return {**answer, "comparison": None, "why": str(error)}
    unit = 1.0 if found.model is not None else _work(real) / _work(planned)
    return {**answer, "comparison": comparison, "unit": unit}


def _way(asked: _Asked) -> dict[str, object]:
    if asked.ways is None:
        raise ValueError(
            "there are no ways to show: start explore-schedules with --candidates (in a checkout: "
            "tools/explore.py)"
        )
    timeline = asked.ways.timeline(asked.values["number"])
    return {"drawing": drawing(timeline), "total": total(timeline), "idle": idle(timeline)}


def _work(timeline: Timeline) -> float:
    """Return the time of all passes on all ranks."""
    return sum(map(timeline.work, range(timeline.ranks)))


_ACTIONS: Final[Mapping[str, Callable[[_Asked], dict[str, object]]]] = {
    "facts": _facts,
    "simulate": _simulate,
    "draw": _draw,
    "point": _point,
    "front": _front,
    "recorded": _recorded,
    "way": _way,
}
