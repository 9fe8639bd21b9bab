"""All ways that a search has looked at, as a folder: each has the values of its own line."""

import json
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
from planning.search.test_search import H100, asked_words, line

from megatron.commands import plan_pretraining
from megatron.planning.answer import Answer
from megatron.planning.asked.question import dry_run_words, question_of
from megatron.planning.explored import write_ways
from megatron.planning.plan_json import as_json
from megatron.planning.propose import propose
from megatron.planning.run_plan import asked
from megatron.planning.search.runs import Runs
from megatron.run.command_line import parse
from megatron.schedules.search.watch import Watch
from megatron.simulator import ways_folder
from megatron.simulator.ways_folder import WaysFolder

WORDS: Final = [
    *asked_words(),
    *("--gpus", "4xH100", "--memory", "24", "--tensor-model-parallel-size", "1"),
    *("--pipeline-model-parallel-size", "4", "--context-parallel-size", "1"),
    *("--micro-batch-size", "1", "--pipeline-schedule", "1f1b", "--num-seq-splits", "1"),
]
"""A job of which the treatment of the vocabulary and ways to hold less are open."""


@cache
def answered() -> Answer:
    return propose(question_of([*WORDS, "--explore", "unused"], None))


def test_the_answer_does_not_depend_on_the_number_of_processes() -> None:
    """Other processes look at ways that are likely to be asked for, and change nothing else."""
    question = question_of([*WORDS, "--explore", "unused"], None)
    with_others = propose(question, processes=3)
    assert as_json(with_others) == as_json(answered())
    assert _comparable(with_others) == _comparable(answered())


def _comparable(answer: Answer) -> list[tuple[object, ...]]:
    """Return what is told of every way."""
    return [
        (own.proposal.words, own.proposal.seconds, own.proposal.peak, own.role, own.timeline)
        for own in answer.seen
    ]


@pytest.fixture
def written(tmp_path: Path) -> tuple[WaysFolder, list[dict[str, Any]]]:
    """Return the folder of the answer as it is read, and its ways as they stand in the file."""
    write_ways(answered(), tmp_path)
    document = json.loads((tmp_path / "candidates.json").read_text())
    return WaysFolder.read(tmp_path), document["ways"]


def test_the_values_of_a_way_are_those_of_its_line(
    written: tuple[WaysFolder, list[dict[str, Any]]],
) -> None:
    """Each line is read anew and estimated by itself, outside any search."""
    _, ways = written
    assert len(ways) > 5
    question, gpu = answered().question, answered().question.gpus.gpu
    for way in ways:
        config = parse(dry_run_words(question, way["words"], 1), 1)
        [candidate] = [own for own in asked(config) if own.treatment == way["vocabulary"]]
        if way["planned"]:
            found = candidate.forecast
            assert found is not None
            seconds, held = found.outcome.seconds, found.fullest
        else:
            estimate = candidate.estimate(Watch(), gpu, quick=True, plain=True)
            seconds, held = estimate.seconds, estimate.fullest
        assert way["seconds"] == pytest.approx(seconds, rel=1e-12)
        assert way["bytes"] == round(held.peak)
        assert way["bytes_left"] == round(held.room(gpu) - held.peak)
        assert way["fits"] == held.fits(gpu)
        assert way["microbatches"] == 32


def test_the_timeline_of_a_way_is_of_its_few_microbatches(
    written: tuple[WaysFolder, list[dict[str, Any]]],
) -> None:
    """Every rank runs F and B of each of them once; more than two rounds of 4 ranks suffice."""
    folder, ways = written
    for way in ways:
        timeline, few = folder.timeline(way["number"]), way["timeline_microbatches"]
        assert few == 2 * 4 + 1 < way["microbatches"]
        for rank in range(4):
            passes = timeline.compute(rank)
            for kind in "FB":
                assert sorted(own.microbatch for own in passes if own.kind == kind) == [*range(few)]
            split = {own.kind for own in passes} >= {"S", "T"}
            assert split == (way["vocabulary"] in ("vocab-1", "vocab-2", "interlaced"))
        # The other microbatches add their work at least.
        work = max(timeline.work(rank) for rank in range(4)) / few
        assert timeline.end + (way["microbatches"] - few) * work <= way["seconds"] * (1 + 1e-9)


def test_the_parts_of_ways_are_those_of_the_answer(
    written: tuple[WaysFolder, list[dict[str, Any]]],
) -> None:
    _, ways = written
    told = as_json(answered())
    assert [way["seconds"] for way in ways] == sorted(way["seconds"] for way in ways)
    named: dict[str, list[list[str]]] = {}
    for way in ways:
        named.setdefault(way["role"], []).append(way["words"])
    assert named["taken"] == [told["taken"]["words"]]
    assert named["unsplit"] == [told["unsplit"]["words"]]
    others = [own["words"] for own in told["runners_up"] if own["words"] not in named["unsplit"]]
    assert named["runner-up"] == others
    assert named.get("obstacle", []) == [own["words"] for own in told["obstacles"]]
    assert len({tuple(sorted(way["words"])) for way in ways}) == len(ways)


def test_a_search_that_nobody_explores_keeps_no_timelines() -> None:
    few = [*WORDS, "--vocab-parallel", "vocab-2", "--recompute-granularity", "full"]
    answer = propose(question_of([*few, "--recompute-method", "uniform", "--memory", "80"], None))
    assert answer.seen
    assert all(own.timeline is None for own in answer.seen)


def test_a_timeline_too_large_for_a_page_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    one = line("--pipeline-model-parallel-size", "4", "--micro-batch-size", "1")
    runs = Runs(H100, keeps_timelines=True)
    runs.estimate(one)
    assert runs.timelines is not None
    kept = runs.timelines[one.key]
    assert kept.ranks == 4
    monkeypatch.setattr(ways_folder, "MOST_SPANS", len(kept.spans) + len(kept.waits) - 1)
    runs = Runs(H100, keeps_timelines=True)
    runs.estimate(one)
    assert runs.timelines == {}


def test_the_command_prints_one_object_beside_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_pretraining, "propose", lambda *_: answered())
    plan_pretraining.main([*WORDS, "--json", "--explore", str(tmp_path / "ways")])
    printed = capsys.readouterr()
    assert json.loads(printed.out) == as_json(answered())
    told = f"explore-schedules --candidates {tmp_path / 'ways'} shows {len(answered().seen)} ways"
    assert told in printed.err
    assert len(WaysFolder.read(tmp_path / "ways").listed["ways"]) == len(answered().seen)


def test_a_folder_of_other_files_is_refused_before_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        plan_pretraining.main([*WORDS, "--explore", str(tmp_path)])
    told = capsys.readouterr().err
    assert f"--explore {tmp_path}: the folder holds other files, such as 'notes.txt'" in told
