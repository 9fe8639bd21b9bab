"""``auto`` on a GPU takes the plan that the GPU runs fastest, and compares treatments if asked."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from harness.marks import full
from planning.test_dry_run import config, few, on, ranked, report
from torch.distributed import HashStore

from megatron.model.distribution import LayerDistribution
from megatron.planning.candidate import Candidate
from megatron.planning.compared import compared_lines, completed
from megatron.planning.known import NEAR
from megatron.planning.race import chosen
from megatron.planning.run_plan import asked, candidates, make_run_plan
from megatron.planning.settled import settled
from megatron.run.parallel_config import ParallelConfig
from megatron.run.run_config import RunConfig
from megatron.schedules.search.watch import Watch
from megatron.schedules.treatment_settings import TreatmentSettings
from megatron.schedules.treatments import TREATMENTS
from megatron.simulator.costs.gpus import USABLE, gpu
from megatron.training.prepare import shared_plan
from megatron.training.rendezvous import Rendezvous

COMPARED = ("none", "redis", "vocab-1", "vocab-2", "interlaced")


def with_all_treatments(run: RunConfig) -> RunConfig:
    """The run with ``--vocab-parallel auto``."""
    ranks = run.parallel.pipeline.size
    layouts = tuple(
        replace(
            run.parallel,
            treatment=TreatmentSettings(name),
            padded_vocab_size=-(-run.parallel.padded_vocab_size // ranks) * ranks,
            layers=LayerDistribution("redis" if name == "redis" else "even"),
        )
        for name in COMPARED
    )
    return with_layouts(run, layouts)


def with_layouts(run: RunConfig, layouts: Sequence[ParallelConfig]) -> RunConfig:
    """The run that leaves its treatment to its plan, with a layout for each."""
    ways = tuple(
        replace(run, parallel=own, taken=(f"--vocab-parallel {own.vocab_parallel}",))
        for own in layouts
    )
    return replace(run, parallel=ways[0].parallel, alternatives=ways)


def limited(run: RunConfig, memory: float) -> RunConfig:
    """The run on A100s of which tensors and communicators can use so many bytes."""
    own = replace(gpu("A100"), memory=memory / USABLE)
    return replace(run, parallel=replace(run.parallel, gpu=own))


def needed(candidate: Candidate) -> float:
    """Bytes of the fullest rank, with those of its communicators."""
    assert candidate.forecast is not None
    return candidate.forecast.fullest.peak + candidate.forecast.fullest.outside


def peaks(run: RunConfig) -> dict[str, float]:
    return {each.schedule: each.peak for each in candidates(on(run, "A100"))}


@pytest.mark.parametrize(
    "vocabulary", [name if name in ("none", "vocab-2") else full(name) for name in TREATMENTS]
)
def test_no_plan_is_faster_than_its_bound_in_seconds(vocabulary: str) -> None:
    for candidate in candidates(on(few(config(2, vocabulary, "auto")), "A100")):
        assert 0 < candidate.least_time <= candidate.time * (1 + 1e-9)


def test_it_takes_the_smallest_of_those_as_fast_as_the_fastest() -> None:
    run = on(few(config(2, "vocab-2", "auto")), "H100")
    taken = chosen(asked(run))
    every = [each for each in candidates(run) if each.fits]
    assert taken.time * (1 - NEAR) <= min(each.time for each in every)
    compared = candidates(run)
    again = chosen(compared)
    near = [c for c in compared if c.is_planned and c.fits and c.time <= again.time]
    assert all(again.peak <= each.peak for each in near)


def test_it_takes_no_plan_that_does_not_fit_if_another_does() -> None:
    run = few(config(2, "vocab-2", "auto"))
    least = min(map(needed, candidates(on(run, "A100"))))
    fastest = chosen(candidates(on(run, "A100")))
    small = limited(run, needed(fastest) * 0.999)
    taken = chosen(asked(small))
    if least < needed(fastest) * 0.999:
        assert taken.fits
        assert taken.schedule != fastest.schedule
    else:
        assert not taken.fits


def test_if_none_fits_it_takes_the_one_that_holds_the_least() -> None:
    run = few(config(2, "vocab-2", "auto"))
    by_schedule = peaks(run)
    taken = chosen(asked(limited(run, min(by_schedule.values()) * 0.999)))
    assert taken.peak == min(by_schedule.values())


def test_what_cannot_fit_is_not_planned() -> None:
    run = few(config(2, "none", "auto"))
    compared = candidates(limited(run, 1e9))
    assert not any(each.can_fit or each.is_planned for each in compared)


def test_the_choice_is_made_again_from_the_plans_of_the_table() -> None:
    """An estimate may hide the fastest from the race; the plans of the table find it."""
    compared = candidates(on(few(config(2, "none", "auto")), "H100"))
    by_time = sorted(compared, key=lambda each: (not each.fits, each.time))
    slowest = [each for each in by_time if each.fits][-1]
    table = completed(slowest, compared, Watch(), every=True)
    near = [each for each in by_time if each.fits and each.time * (1 - NEAR) <= by_time[0].time]
    assert table.taken.peak == min(each.peak for each in near)
    assert table.taken is not slowest
    told = compared_lines(table, gpu("H100"), "20 s")
    assert "takes the first: no other that fits is more than 1% faster" in told
    assert ranked(told)[0][0] == table.taken.schedule


@pytest.mark.parametrize("schedule", ["1f1b", full("auto")])
def test_treatments_are_compared(schedule: str) -> None:
    run = with_all_treatments(few(config(2, "none", schedule)))
    text = report(run)
    rows = ranked(text)
    assert {row[1] for row in rows} == set(COMPARED)
    [(own, treatment)] = re.findall(r"takes (\S+) with --vocab-parallel (\S+):", text)
    assert rows[0][:2] == [own, treatment]
    assert f"vocabulary {treatment};" in text
    seconds = [float(row[2]) for row in rows]
    assert seconds[0] * 0.99 <= min(seconds) + 5e-4


def test_the_run_has_the_treatment_of_its_plan() -> None:
    """By FLOPs too, where there is no GPU; another rank reads the treatment with the plan."""
    run = with_all_treatments(few(config(2, "none", "1f1b")))
    found = make_run_plan(run)
    times: dict[str, Candidate] = {each.treatment: each for each in asked(run)}
    taken = found.plan.treatment.name
    assert taken in COMPARED
    assert found.taken == (f"--vocab-parallel {taken}",)
    assert times[taken].time * (1 - NEAR) <= min(each.time for each in times.values())
    assert shared_plan(Rendezvous(HashStore(), 0, 1), found) == found
    own = settled(run, found)
    assert (own.parallel.vocab_parallel, own.alternatives) == (taken, ())
    assert own.notes == (f"auto takes --vocab-parallel {taken}",)
    assert make_run_plan(own) == found
    assert settled(own, found) == own


def test_a_treatment_that_cannot_be_is_left_out() -> None:
    """Two layers on three ranks leave a rank empty, unless it has a shard of the vocabulary."""
    run = few(config(3, "none", "1f1b"))
    run = replace(run, model=replace(run.model, num_layers=2))
    layers = LayerDistribution("explicit", counts=(1, 0, 1))
    run = with_all_treatments(run)
    run = with_layouts(run, [replace(own.parallel, layers=layers) for own in run.alternatives])
    assert {each.treatment for each in asked(run)} == {"vocab-1", "vocab-2", "interlaced"}
