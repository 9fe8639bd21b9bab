"""The tables of pairs: what they say of a job, and that they are those of today's code."""

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
from harness.marks import full

from megatron.planning.where_time_goes import PassSeconds
from megatron.run.command_line import parse
from tools import pairs_page
from tools.pages.tables import PAGE, percent, replaced
from tools.predictions.paired import Figures, Job, figures
from tools.predictions.paired_jobs import (
    REFERENCE,
    SETTINGS,
    Setting,
    jobs_of_passes,
    layouts,
    stp_jobs,
    wide_jobs,
)
from tools.predictions.scenarios import Scenario
from tools.predictions.shared_runs import SHARED, read_shared

TEXT = PAGE.read_text(encoding="utf-8")
LINES = TEXT.splitlines()
JOBS = [job for own in layouts() for job in own.jobs]
QUICK = ("Qwen3 on 8 1f1b none 0", "70B on 32 interleaved/5 none 0")
"""Jobs whose rows a default run predicts."""


def small(schedule: str, treatment: str = "none") -> Job:
    """Return a job of the 8B on two pipeline ranks of four."""
    scenario = Scenario("8B", pipeline=2, tensor=4, schedule=schedule, treatment=treatment)
    return Job("8B", schedule, treatment, scenario._replace(samples=6).flags, "H100")


def name_of(job: Job) -> str:
    return f"{job.name} {job.schedule} {job.treatment} {job.limit}"


def test_the_row_of_a_job_has_both_predictions() -> None:
    job = small("dualpipe-v")
    alone, paired = (figures(job, paired=own) for own in (False, True))
    assert paired.seconds < alone.seconds
    assert paired.exposed < alone.exposed
    assert alone.exposed == pytest.approx(alone.waits["tensor"])
    cells = [cell.strip() for cell in pairs_page.job_row(job).strip("|").split("|")]
    assert cells[:4] == ["none", "`dualpipe-v`", f"{alone.seconds:.2f}", f"{paired.seconds:.2f}"]
    assert cells[4:6] == [
        f"{own.exposed:.2f} s, {percent(own.exposed / own.seconds)}" for own in (alone, paired)
    ]
    assert len(cells) == len(pairs_page.COLUMNS)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(
    ("schedule", "treatment"),
    [("1f1b", "vocab-2"), ("interleaved/4", "none"), ("zb-v", "vocab-2"), ("dualpipe-v", "none")],
)
def test_exposed_waits_add_up_over_their_places(
    schedule: str, treatment: str, *, paired: bool
) -> None:
    """By pass and by reason: two sums over the same timeline."""
    own = figures(small(schedule, treatment), paired=paired)
    assert sum(own.places.values()) == pytest.approx(own.exposed, rel=1e-6)
    assert min(own.places.values()) >= 0
    in_pairs = own.places["F with B"] + own.places["other pairs"]
    assert paired or in_pairs == 0
    assert (own.places["W alone"] > 0) == (schedule in ("zb-v", "dualpipe-v"))
    assert own.places["first F"] > 0
    assert own.places["last B"] > 0


def test_places_are_those_of_a_pipeline_that_is_known_by_heart() -> None:
    """1F1B on two ranks: the first has two F before its first B, and two B after its last F.

    The second has one of each.
    """
    found = small("1f1b").forecast(paired=False)
    own, passes = Figures.of(found), PassSeconds(found)
    for place, kind in (("first F", "F"), ("last B", "B")):
        first, second = (
            next(passes.of(span) for span in found.timeline.compute(rank) if span.kind == kind)
            for rank in range(2)
        )
        expected = (2 * first["tensor"] + second["tensor"]) / 2
        assert own.places[place] == pytest.approx(expected, rel=1e-9)


def test_pairs_hide_all_reduces_too() -> None:
    """Without sequence parallelism B waits for no collective, and still lets F wait behind it."""
    found = stp_of(SETTINGS[0])["dualpipe-v"].forecast(paired=True)
    assert found.run_plan.plan.pairs
    own, alone = Figures.of(found), figures(stp_of(SETTINGS[0])["dualpipe-v"], paired=False)
    assert own.exposed < 0.3 * alone.exposed


def stp_of(setting: Setting) -> dict[str, Job]:
    return {job.schedule: job for job in stp_jobs(setting)}


def test_every_job_has_the_ranks_and_layers_of_its_layout() -> None:
    runs = {run.number: run for run in read_shared(REFERENCE / SHARED)[0]}
    numbers = {"70B on 64": 1268, "405B on 128": 1350, "Qwen3 on 8": 1215}
    for job in JOBS:
        config = parse(f"{job.flags} {job.pairs}".split(), 1, speak=False)
        if job.name in numbers:
            run = runs[numbers[job.name]]
            own = config.parallel
            assert own.tensor.size == run.tensor
            assert own.pipeline.size == run.pipeline
            assert config.train.global_batch_size == run.global_batch
            assert config.model.num_layers == run.model.layers


def test_layers_that_the_stages_do_not_divide_are_spread_by_the_treatment() -> None:
    [run] = [run for run in read_shared(REFERENCE / SHARED)[0] if run.number == 1350]
    assert "--account-for-loss-in-pipeline-split" in run.flags_with("interleaved", "none")
    split = run.flags_with("interleaved", "vocab-2")
    assert "--layer-distribution remainder" in split
    assert "--account-for" not in split
    few = replace(run, pipeline=3, chunks=8)  # 62 = 23 x 3 - 7
    assert "--layer-distribution remainder" in few.flags_with("interleaved", "none")
    assert "--num-virtual-stages" not in run.flags_with("zb-v", "none")


def cover() -> Iterator[Job]:
    """Yield every schedule of every layout with one treatment, which neighbours have by turns."""
    for place, layout in enumerate(layouts()):
        schedules = dict.fromkeys(job.schedule for job in layout.jobs)
        for number, schedule in enumerate(schedules):
            usual = [job for job in layout.jobs if job.schedule == schedule and not job.limit]
            yield usual[(place + number) % len(usual)]
        yield from (job for job in layout.jobs if job.limit)


COVER = list(dict.fromkeys([*(job for job in JOBS if name_of(job) in QUICK), *cover()]))
WIDE = set(wide_jobs())


def test_every_schedule_and_every_treatment_of_a_layout_is_predicted_anew() -> None:
    for factor in map(attrgetter, ("schedule", "treatment")):
        found, every = (
            {(job.name, factor(job), bool(job.limit)) for job in own} for own in (COVER, JOBS)
        )
        assert found == every
    assert {job.name for job in WIDE & {*COVER}} == {job.name for job in WIDE}


@pytest.mark.parametrize(
    "job", [job if name_of(job) in QUICK else full(job) for job in COVER], ids=map(name_of, COVER)
)
def test_a_row_of_a_layout_is_a_new_prediction(job: Job, tmp_path: Path) -> None:
    """In both tables, if it is in both. Else: python tools/pairs_page.py --update."""
    assert pairs_page.job_row(job, tmp_path) in LINES
    assert job not in WIDE or pairs_page.place_row(job, tmp_path) in LINES


@pytest.mark.parametrize(
    "job", [job if name_of(job) in QUICK else full(job) for job in jobs_of_passes()], ids=name_of
)
def test_passes_wait_as_long_as_the_page_says(job: Job) -> None:
    """Else: python tools/pairs_page.py --update."""
    assert "\n".join(pairs_page.pass_rows(job)) in TEXT


@pytest.mark.parametrize(
    "setting",
    [SETTINGS[0], *(full(own) for own in SETTINGS[1:])],
    ids=[own.name for own in SETTINGS],
)
def test_rows_of_stp_are_new_predictions(setting: Setting) -> None:
    """Else: python tools/pairs_page.py --update."""
    assert "\n".join(pairs_page.stp_rows(setting)) in TEXT


def test_every_layout_is_on_the_page_with_its_measurement() -> None:
    for own in layouts():
        heading = f"**{own.title}.** {own.source}."
        place = LINES.index(heading)
        assert LINES[place + 4 : place + 4 + len(own.jobs)] == [
            line for line in LINES[place + 4 : place + 4 + len(own.jobs)] if line.startswith("|")
        ]
        assert LINES[place + 4 + len(own.jobs)] in ("", f"<!-- {pairs_page.TOOL}: end -->")


def test_the_page_has_all_parts_of_the_tool() -> None:
    assert "\nd\n" in replaced(TEXT, ["a", "b", "c", "d"], pairs_page.TOOL)
