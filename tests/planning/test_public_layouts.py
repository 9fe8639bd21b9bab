"""Memory refuses no layout that others trained with, and every layout that cannot run."""

from collections.abc import Iterator
from typing import Final

import pytest
from _pytest.mark import ParameterSet
from harness.marks import full
from planning.public_layouts import SOUND, PublicLayout, config
from planning.unsound_layouts import UNSOUND, Unsound

from megatron.planning import must_fit
from megatron.planning.candidate import Candidate
from megatron.planning.forecast_run import forecast_run
from megatron.planning.must_fit import check_memory
from megatron.planning.planned_run import RunPlan
from megatron.planning.run_memory import Fullest
from megatron.planning.run_plan import asked, make_run_plan
from megatron.schedules.make_plan import one_microbatch_of
from megatron.simulator.costs.gpus import gpu

QUICK: Final = 16
"""The most stages of a plan that is made in a second or so with any number of microbatches."""


def least(layout: PublicLayout) -> Fullest:
    """Return what the fullest rank holds at least, by the check before a plan."""
    return min((one.least_memory for one in asked(config(layout))), key=lambda held: held.peak)


def refusals(layout: PublicLayout, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the words with which the start of a run refuses a layout on its GPUs, by rank."""
    run, memory = config(layout), int(gpu(layout.gpu).memory)
    monkeypatch.setattr(must_fit, "_memory", lambda _: memory)
    short = _with_one_microbatch(asked(run)[0])
    for rank in range(run.parallel.pipeline.size):
        try:
            check_memory(run, short, rank)
        except ValueError as refused:
            yield str(refused)


def _with_one_microbatch(candidate: Candidate) -> RunPlan:
    """Return a plan with the stages and layers of a candidate, which needs no search."""
    request = candidate.request
    return RunPlan(one_microbatch_of(request), candidate.layers, request.costs, request.schedule)


def number(layout: PublicLayout, flag: str) -> int:
    """Return the number behind a flag of a layout, which is 1 without the flag."""
    words = layout.flags.split()
    return int(words[words.index(flag) + 1]) if flag in words else 1


def by_length(layout: PublicLayout) -> ParameterSet:
    """Return a layout as a case that a default run leaves out where its plan takes long."""
    ranks = number(layout, "--pipeline-model-parallel-size")
    stages = ranks * number(layout, "--num-virtual-stages-per-pipeline-rank")
    mark = full if stages > QUICK else pytest.param
    return mark(layout, id=layout.name)


def test_there_are_forty_and_ten() -> None:
    names = {layout.name for layout in (*SOUND, *(each.layout for each in UNSOUND))}
    assert (len(SOUND), len(UNSOUND), len(names)) == (40, 10, 50)
    assert all(8 <= layout.gpus <= 1024 for layout in SOUND)


@pytest.mark.parametrize("layout", SOUND, ids=lambda layout: layout.name)
def test_the_whole_job_is_read(layout: PublicLayout) -> None:
    run = config(layout)
    assert run.parallel.grid.world_size == layout.gpus
    assert run.train.global_batch_size >= run.train.replicas * run.train.micro_batch_size


@pytest.mark.parametrize("layout", SOUND, ids=lambda layout: layout.name)
def test_a_sound_layout_is_not_refused_before_its_plan(layout: PublicLayout) -> None:
    assert least(layout).fits(gpu(layout.gpu))


@pytest.mark.parametrize("layout", SOUND, ids=lambda layout: layout.name)
def test_a_sound_layout_is_not_refused_when_it_starts(
    layout: PublicLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not list(refusals(layout, monkeypatch))


@pytest.mark.parametrize("layout", [by_length(layout) for layout in SOUND])
def test_a_sound_layout_fits_with_its_plan(layout: PublicLayout) -> None:
    run, kind = config(layout), gpu(layout.gpu)
    found = forecast_run(run, make_run_plan(run), kind)
    assert found.fits, found.fullest


@pytest.mark.parametrize("unsound", UNSOUND, ids=lambda each: each.layout.name)
def test_an_unsound_layout_is_refused(unsound: Unsound) -> None:
    """Also by hand; the check counts all that is counted by hand."""
    usable = gpu(unsound.layout.gpu).usable
    assert least(unsound.layout).peak > unsound.least > usable
