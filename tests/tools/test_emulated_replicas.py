"""Emulated replicas: the sums of a bucket show whether it was reduced, updated and read in time."""

import re
from dataclasses import replace
from datetime import timedelta

import pytest
from correctness.rank_runs import CPU
from harness.rank_pool import RankPool

from megatron.parallel.grid import Grid
from megatron.parallel.groups import make_groups
from megatron.parallel.lanes import make_lane
from megatron.schedules.costs import UNIT_COSTS
from megatron.schedules.lower import Instruction, Program, Start, Wait, lower
from megatron.schedules.make_plan import make_plan
from megatron.simulator.exchange import EvenBuckets, Overlap
from tools.emulate import main
from tools.emulation.cases import parse_grid
from tools.emulation.rank import EmulatedJob, Lanes, run_job

GRID = Grid(data_size=2, pipeline_size=2)
ALL = Overlap(reduce=True, updates=True, gather=True)


def run_emulated(rank: int, world_size: int, *, jobs: list[EmulatedJob]) -> list[list[int]]:
    """Return this rank's checksum of every iteration of every job."""
    groups = make_groups(GRID, CPU, timedelta(seconds=60), ends=(0, 0))
    lanes = Lanes(*(make_lane(CPU, 2, name) for name in ("vocabulary", "gradients", "host")))
    checksums = [run_job(job, groups, lanes, overshoot=0.0).checksums for job in jobs]
    lanes.vocabulary.close()
    lanes.gradients.close()
    return checksums


def job_of(
    schedule: str, vocabulary: str, overlap: Overlap, unit: float = 0.0, jitter: float = 0.0
) -> EmulatedJob:
    buckets = EvenBuckets(overlap, cut=2)
    program = buckets.added_to(lower(make_plan(schedule, vocabulary, 2, 4, UNIT_COSTS)))
    return EmulatedJob(
        program,
        UNIT_COSTS,
        unit,
        iterations=2,
        jitter=jitter,
        buckets=buckets.of(program.plan),
        sharded=overlap.updates,
    )


@pytest.mark.parametrize(
    ("schedule", "vocabulary"), [("1f1b", "none"), ("zb-v", "vocab-2"), ("interleaved", "vocab-1")]
)
def test_overlap_changes_no_sum_and_lateness_neither(
    schedule: str, vocabulary: str, ranks: RankPool
) -> None:
    apart = job_of(schedule, vocabulary, Overlap(updates=True))
    beside = job_of(schedule, vocabulary, ALL)
    late = job_of(schedule, vocabulary, ALL, unit=1e-3, jitter=0.5)
    found = ranks.run(run_emulated, GRID.world_size, jobs=[apart, beside, late])
    for first, second, third in found:
        assert first == second == third
        assert first[0] == first[1], "every iteration comes to the same"
    assert len({tuple(own[0]) for own in found}) == len(found), "every rank has other numbers"


def test_what_is_done_too_early_or_too_late_is_seen(ranks: RankPool) -> None:
    right = job_of("zb-h1", "none", ALL, unit=2e-3)
    early = replace(right, program=moved(right.program, "RG"))
    late = replace(right, program=moved(right.program, "AG"))
    for expected, reduced, gathered in ranks.run(
        run_emulated, GRID.world_size, jobs=[right, early, late]
    ):
        assert reduced != expected, "a bucket is reduced before its last pass"
        assert gathered != expected, "a bucket is gathered after its first reader"


def moved(program: Program, kind: str) -> Program:
    """Reduce all buckets before the first pass, or gather them after the last one."""
    rows = []
    for row in program.rows:
        own = [step for step in row if isinstance(step, Start | Wait) and step.comm.kind == kind]
        others = [step for step in row if step not in own]
        ordered: list[Instruction] = sorted(own, key=lambda step: isinstance(step, Wait))
        rows.append(tuple(ordered + others if kind == "RG" else others + ordered))
    return replace(program, rows=tuple(rows))


def test_a_grid_is_replicas_and_pipeline_ranks() -> None:
    assert parse_grid("d=4,p=2") == (4, 2)
    assert parse_grid("p=1,d=3") == (3, 1)


@pytest.mark.parametrize("text", ["", "4", "d=4", "d=4,p=0", "d=4,p=x", "d=4,p=2,t=2"])
def test_other_texts_are_no_grid(text: str) -> None:
    with pytest.raises(ValueError, match="give replicas and pipeline ranks"):
        parse_grid(text)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--csv runs.csv --grid d=2,p=2", "--grid .* goes with --measured-costs"),
        ("--costs costs.json --grid d=2,p=2 -p 3", "goes with --measured-costs without --grid"),
        ("--costs costs.json --overlap-grad-reduce", "goes with --grid with several replicas"),
    ],
)
def test_flags_of_replicas_that_do_nothing_are_refused(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(flags.split())
    assert re.search(message, capsys.readouterr().err)
