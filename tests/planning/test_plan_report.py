"""The answer to "which line for my GPUs?": its figures by hand, in words and as JSON."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from megatron.planning.answer import Answer, Obstacle, Proposal
from megatron.planning.asked.gpus import gpus_of
from megatron.planning.asked.question import Question, dry_run_words
from megatron.planning.plan_json import as_json
from megatron.planning.plan_report import layout, named, report
from megatron.planning.run_plan import asked
from megatron.run.command_line import parse

MODEL: Final = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --bf16 "
    "--max-position-embeddings 2048 --vocab-size 128000 --untie-embeddings-and-output-weights "
    "--global-batch-size 64 --train-iters 100"
)
QUESTION: Final = Question(
    gpus_of("8xH100"), 2048, global_batch_size=64, tokens=10**9, words=tuple(MODEL.split())
)
SPLIT: Final = (
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4 "
    "--micro-batch-size 1 --vocab-parallel {}"
)


@cache
def way(words: str, replicas: int = 1) -> Proposal:
    """A planned way to run the job."""
    given = tuple(words.split())
    candidate = asked(parse(dry_run_words(QUESTION, given, replicas), 1))[0]
    found = candidate.forecast
    assert found is not None
    held = found.fullest
    return Proposal(
        given,
        candidate.config,
        found.outcome.seconds,
        held.peak,
        held.room(found.gpu),
        candidate.in_flight,
        found,
        planned=True,
    )


def estimated(proposal: Proposal, seconds: float, peak: float) -> Proposal:
    """A way that is not planned, with other figures."""
    return replace(
        proposal, seconds=seconds, peak=peak, forecast=None, in_flight=None, planned=False
    )


@cache
def answer() -> Answer:
    """An answer with everything in it."""
    taken, unsplit = way(SPLIT.format("vocab-2")), way(SPLIT.format("none"))
    slower = way("--micro-batch-size 2 --pipeline-model-parallel-size 4", 2)
    alone = way("--micro-batch-size 4 --tensor-model-parallel-size 8 --sequence-parallel")
    large = estimated(alone, 0.9 * taken.seconds, alone.room + 3 * 2**30)
    return Answer(
        QUESTION,
        taken,
        unsplit,
        [estimated(slower, 1.25 * taken.seconds, 2**30)],
        [Obstacle(large, ("recompute the norms (2 GiB)", "offload 1 chunk (4 GiB)"))],
        "10 runs were bounded",
    )


def test_figures_follow_from_the_seconds() -> None:
    taken = answer().taken
    speed = 64 * 2048 / taken.seconds
    assert taken.tokens_per_second(QUESTION) == pytest.approx(speed)
    assert taken.days(QUESTION) == pytest.approx(10**9 / speed / 86400)
    assert taken.days(replace(QUESTION, tokens=None)) is None
    assert taken.forecast is not None
    assert taken.mfu(QUESTION) == pytest.approx(taken.forecast.outcome.mfu)
    assert taken.left == pytest.approx(taken.room - max(taken.forecast.outcome.peak))


def test_the_mfu_of_replicas_is_that_of_the_forecast() -> None:
    found = way("--micro-batch-size 2 --pipeline-model-parallel-size 4", 2)
    assert found.forecast is not None
    assert found.mfu(QUESTION) == pytest.approx(found.forecast.outcome.mfu)


def test_the_report_has_all_that_was_asked_for() -> None:
    found = answer()
    taken, text = found.taken, "\n\n".join(report(found))
    speed = 64 * 2048 / taken.seconds
    for words in (
        "a model by its flags: 8 layers, hidden size 1,024, vocabulary 128,000; on 1x8xH100",
        "10 runs were bounded",
        f"{speed:,.0f} tokens/s, {speed / 8:,.0f} a GPU; MFU ",
        "1B tokens take ",
        "GiB by pipeline rank: ",
        "without a split vocabulary: ",
        "where the seconds go, on average over the ranks:",
        "waiting for tensor-parallel ranks",
        "waiting for collectives of the vocabulary",
        "+25.0%    1.0 GiB, estimated  p 4, d 2, --micro-batch-size 2, no --vocab-parallel",
        "t 8, --micro-batch-size 4, no --vocab-parallel would take ",
        "10.0% less, and lacks 3.0 GiB: recompute the norms (2 GiB), offload 1 chunk (4 GiB)",
        "torchrun --standalone --nproc-per-node 8 pretrain_gpt.py",
        " --vocab-parallel vocab-2",
        "checked: ",
    ):
        assert words in text, words
    assert found.unsplit is not None
    gain = found.unsplit.seconds / taken.seconds - 1
    assert gain > 0  # the vocabulary is most of this model's work
    assert f"the split makes the job {gain:.1%} faster" in text
    lines = [line for line in text.splitlines() if line.startswith("  ") and "%  " in line]
    shares = [line for line in lines if line.split()[2][0] not in "+-"]
    assert shares == sorted(shares, key=lambda line: -float(line.split()[0]))
    told = sum(float(line.split()[0]) for line in shares)
    assert told == pytest.approx(taken.seconds, abs=0.0005 * len(shares))  # each line is rounded


def test_the_split_when_there_is_nothing_to_compare() -> None:
    alone = replace(answer(), unsplit=None)
    assert "without a split vocabulary no way was found that fits" in "\n".join(report(alone))
    unsplit = replace(answer(), taken=way(SPLIT.format("none")))
    assert "the vocabulary is not split: no way" in "\n".join(report(unsplit))


def test_notes_on_the_line_are_told() -> None:
    found = answer()
    config = replace(found.taken.config, notes=("--grad-reduce-in-bf16 also adds up in bf16",))
    told = list(report(replace(found, taken=replace(found.taken, config=config))))
    assert "--grad-reduce-in-bf16 also adds up in bf16" in told


def test_short_names() -> None:
    taken = answer().taken
    assert layout(taken) == "t 2, p 4"
    assert named(taken) == "t 2, p 4, --micro-batch-size 1, --vocab-parallel vocab-2"
    assert named(taken, taken) == "t 2, p 4"
    assert named(way("--micro-batch-size 1"), taken) == "one GPU, no --vocab-parallel"


def test_the_layout_of_a_mixture_names_the_ranks_that_share_its_experts() -> None:
    ranks = "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1"
    mixture = way(f"--micro-batch-size 1 --num-experts 8 {ranks}", 8)
    assert mixture.sizes == {"t": 1, "p": 1, "c": 1, "d": 8, "e": 4}
    assert layout(mixture) == "d 8, e 4"
    whole = way("--micro-batch-size 1 --num-experts 8", 8)
    assert layout(whole) == "d 8"
    assert whole.sizes["e"] == 1


def test_json_has_the_same_figures() -> None:
    found = answer()
    told = json.loads(json.dumps(as_json(found)))
    assert told["gpus"] == {"name": "H100", "count": 8, "machines": 1, "per_machine": 8}
    assert told["batch"] == {"samples": 64, "seq_length": 2048, "tokens": 64 * 2048}
    taken = told["taken"]
    assert taken["layout"] == {"t": 2, "p": 4, "c": 1, "d": 1}
    assert taken["seconds"] == found.taken.seconds
    assert sum(taken["seconds_by_reason"].values()) == pytest.approx(found.taken.seconds)
    assert max(taken["bytes_by_rank"]) == taken["bytes"]
    assert taken["planned"] is True
    assert told["runners_up"][0]["planned"] is False
    assert told["obstacles"][0]["bytes_left"] == -3 * 2**30
    assert told["obstacles"][0]["remedies"][0] == "recompute the norms (2 GiB)"
    assert told["line"].endswith("--vocab-parallel vocab-2")
    assert told["words"] == [*QUESTION.words, *found.taken.words]
    assert told["split_gains"] > 0
    assert as_json(replace(found, unsplit=None))["split_gains"] is None


def test_the_page_has_every_field_of_the_json() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "running.md").read_text("utf-8")
    told = page[page.index("## Which line for my GPUs") : page.index("## A plan of your own")]
    found = as_json(answer())
    ways = [found["taken"], found["unsplit"], found["runners_up"][0], found["obstacles"][0]]
    for name in {*found, *found["gpus"], *found["batch"], *(key for way in ways for key in way)}:
        assert f"`{name}`" in told, name
