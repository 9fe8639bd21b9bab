"""The gallery: pictures of equal work, whose headlines and page say time and idle share."""

import re
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import pytest
from schedules import by_hand

from megatron.commands.draw_schedule import OUTPUT_LAYER, Panels, draw, figures, pictures
from megatron.schedules.catalogue import SCHEDULES
from megatron.schedules.check import check
from megatron.schedules.costs import Costs
from megatron.schedules.held import in_flight
from megatron.schedules.lower import lower
from megatron.schedules.make_plan import stages_of
from megatron.schedules.passes import Pass
from megatron.schedules.plan import Plan
from megatron.schedules.request import Request
from megatron.simulator.costs.output_layer_costs import spread_output_layer
from megatron.simulator.draw.picture import WIDTH
from megatron.simulator.draw.svg import paint_svg
from megatron.simulator.scenario import Simulation, run
from megatron.simulator.simulate import Span, Timeline
from tools.choosing_page import SIZES, picture_of
from tools.diagrams import PICTURES as DIAGRAMS

ROOT: Final = Path(__file__).resolve().parents[2]
IMAGES: Final = ROOT / "images"
PICTURES: Final = pictures()
ROUNDING: Final = 0.006
"""Of the times below 100 in a picture's notes, which have four digits."""
QUICK: Final = ("1f1b_vocab.svg", "pairs.svg", "treatments.svg", "gpipe.svg", "1f1b.svg")


def read_back(svg: str) -> dict[str, Timeline]:
    """Return the passes of every panel by its title, from the notes of boxes; strips are joined."""
    root = ElementTree.fromstring(svg)
    headlines = [e.text or "" for e in root.iter() if e.get("class") == "title"]
    rows: list[list[Span]] = []
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        look, note = (box.get("class") or "").split(), "".join(box.itertext())
        if look == ["idle"]:
            rows.append([])
        elif look[:1] == ["pass"] and note:
            label, start, end = re.split(": | to ", note)
            kind, microbatch, chunk, _ = Pass.parse(label)
            times = float(start), float(end)
            rows[-1].append(Span(0, "compute", label, kind, microbatch, chunk, *times))
    ranks = len(rows) // len(headlines)
    panels: dict[str, dict[Span, None]] = {}
    for number, row in enumerate(rows):
        title = headlines[number // ranks].split(": time")[0]
        own = (span._replace(rank=number % ranks) for span in row)
        panels.setdefault(title, {}).update(dict.fromkeys(own))
    return {title: Timeline(ranks, tuple(spans)) for title, spans in panels.items()}


def plan_drawn(timeline: Timeline, request: Request) -> Plan:
    """Return the plan that is drawn. The input layer takes no time and is not: it goes to the ends.

    So the order of its passes among the others is not known.
    """
    microbatches = range(request.microbatches if request.treatment.is_sharded else 0)
    rows = (
        (
            *(Pass("IF", i) for i in microbatches),
            *(Pass.parse(span.label) for span in timeline.compute(rank)),
            *(Pass("IB", i) for i in microbatches),
        )
        for rank in range(timeline.ranks)
    )
    return Plan(tuple(rows), stages_of(request), request.microbatches, request.treatment)


def assert_runs(plan: Plan, drawn: Timeline, costs: Costs) -> None:
    """Every pass takes its time and starts when all that it needs has ended."""
    check(plan)
    at = {(span.rank, span.label): span for span in drawn.spans}
    before = by_hand.predecessors(plan)
    for node, span in at.items():
        time = costs.of_pass(plan, span.rank, Pass.parse(span.label))
        assert span.end - span.start == pytest.approx(time, abs=ROUNDING)
        needed = chain.from_iterable(before[n] if n[0] < 0 else [n] for n in before[node])
        assert all(at[n].end <= span.start + ROUNDING for n in needed if n in at)


def simulations(panels: Panels) -> dict[str, Simulation]:
    return {title: run(case) for title, case in panels.items()}


def figures_of(name: str, drawn: dict[str, Simulation]) -> str:
    """Return the lines of a picture in the gallery's page."""
    rows = [line for line in figures({name: drawn}).splitlines() if line.startswith("|")]
    return "\n".join(rows[2:])


@pytest.mark.parametrize("name", QUICK)
def test_a_picture_in_the_repository_is_what_the_tool_draws(name: str) -> None:
    drawn = simulations(PICTURES[name])
    assert paint_svg(draw(drawn)) == (IMAGES / name).read_text(), "run python tools/draw.py"
    assert figures_of(name, drawn) in (IMAGES / "README.md").read_text(), "run python tools/draw.py"


@pytest.mark.parametrize("name", [name for name in PICTURES if name not in QUICK])
def test_a_picture_shows_plans_that_run_as_they_are_drawn(name: str, tmp_path: Path) -> None:
    """They are read back, since finding them takes long; the full run does that."""
    kept = (IMAGES / name).read_text()
    panels, drawn = read_back(kept), {}
    assert [*panels] == [*PICTURES[name]]
    for title, case in PICTURES[name].items():
        request, timeline = case.request, panels[title]
        plan = plan_drawn(timeline, request)
        if request.treatment.is_sharded:
            layer = (request.ranks, request.treatment, OUTPUT_LAYER)
            assert_runs(plan, timeline, spread_output_layer(request.costs, *layer))
            drawn[title] = Simulation(lower(plan), request.schedule, timeline, in_flight(plan))
        else:
            file = tmp_path / "plan.txt"
            file.write_text(plan.to_text())
            drawn[title] = run(replace(case, request=replace(request, schedule="file", file=file)))
        promise = SCHEDULES[request.schedule].promise(plan.ranks, plan.microbatches, plan.chunks)
        assert max(drawn[title].in_flight) <= promise + request.treatment.delay
    assert paint_svg(draw(drawn)) == kept, "run python tools/draw.py"
    assert figures_of(name, drawn) in (IMAGES / "README.md").read_text(), "run python tools/draw.py"


def test_every_schedule_that_is_not_searched_has_a_picture_and_none_is_left_over() -> None:
    own = {f"{name}.svg" for name, schedule in SCHEDULES.items() if not schedule.searched}
    assert set(PICTURES) == {"1f1b_vocab.svg", "pairs.svg", "treatments.svg", *own}
    charts = {picture_of(name).name for name in SIZES}
    assert {file.name for file in IMAGES.iterdir()} == {*PICTURES, *DIAGRAMS, *charts, "README.md"}


@pytest.mark.parametrize("name", QUICK[2:])
def test_all_panels_of_a_picture_do_the_same_work(name: str) -> None:
    works = [
        sum(map(done.timeline.work, range(done.timeline.ranks)))
        for done in simulations(PICTURES[name]).values()
    ]
    assert works == pytest.approx([works[0]] * len(works))


def test_more_barriers_hold_more_microbatches() -> None:
    held = [max(done.in_flight) for done in simulations(PICTURES["treatments.svg"]).values()]
    assert held == [8 + 3, 8 + 2, 8 + 1]


@pytest.mark.parametrize("picture", sorted(PICTURES))
def test_a_picture_fits_a_page_and_its_headlines_begin_with_time_and_idle(picture: str) -> None:
    root = ElementTree.fromstring((IMAGES / picture).read_text())
    assert int(root.attrib["width"]) <= WIDTH
    titles = [e.text or "" for e in root.iter() if e.get("class") == "title"]
    assert len(titles) > 1
    for title in titles:
        assert re.search(r": time [0-9.]+, idle [0-9.]+%, [0-9.]+ microbatches in flight$", title)
