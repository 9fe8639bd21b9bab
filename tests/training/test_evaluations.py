"""Evaluations of a run as they are printed and recorded: between iterations, at the end, alone."""

import io
import json
import re
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from correctness.rank_runs import make_pipeline_groups
from correctness.short_runs import Layout
from harness.rank_pool import RankPool
from training.test_checkpointing import JOB, Batches

from megatron.checkpoint.settings import CheckpointSettings
from megatron.data.shares import EvaluationSet
from megatron.run.records import RecordSettings
from megatron.run.run_config import RunConfig
from megatron.training import evaluations as evaluations_module
from megatron.training.evaluations import Evaluations
from megatron.training.loop import train
from megatron.training.metrics.log import Log
from megatron.training.open_data import Data, evaluations_of_validation
from megatron.training.rendezvous import UserError
from megatron.training.setup import build_train_state

LAYOUT = Layout(2, "vocab-2")
BOTH: tuple[EvaluationSet, ...] = ("validation", "test")


def run_on_rank(rank: int, world_size: int, *, config: RunConfig) -> str:
    state = build_train_state(config, make_pipeline_groups())
    validation, test = (Batches(JOB.batches(seed=seed) * 3) for seed in (1, 2))
    with redirect_stdout(io.StringIO()) as out:
        try:
            train(config, state, Data(Batches(JOB.batches()), {"validation": validation}, test))
        except UserError as error:
            state.pipeline.close()
            return str(error)
    return out.getvalue()


def run(
    ranks: RankPool,
    folder: Path,
    *,
    layout: Layout = LAYOUT,
    interval: int | None = None,
    sets: tuple[EvaluationSet, ...] = BOTH,
    post_validation: bool = False,
    exit_interval: int | None = None,
    skip_train: bool = False,
    log_interval: int = 2,
    jsonl: str | None = None,
    **checkpoint: Any,
) -> str:
    """What rank 0 prints."""
    config = JOB.config(layout)
    records = RecordSettings(log_jsonl=None if jsonl is None else folder / jsonl)
    config = replace(
        config,
        train=replace(
            config.train,
            exit_interval=exit_interval,
            eval_interval=interval,
            final_sets=sets,
            skip_train=skip_train,
        ),
        optimizer=replace(config.optimizer, post_validation=post_validation),
        log=replace(config.log, peak_tflops=1.0, records=records, log_interval=log_interval),
        checkpoint=CheckpointSettings(**checkpoint),
    )
    said: str = ranks.run(run_on_rank, layout.ranks, config=config)[0]
    return said


def evaluations(said: str) -> list[str]:
    """The validation lines."""
    return [line for line in said.splitlines() if "validation loss" in line]


def losses(said: str) -> list[str]:
    """The values of training losses that are printed."""
    return [
        line.partition("lm loss: ")[2][:12] for line in said.splitlines() if "lm loss: " in line
    ]


def test_a_run_without_training_prints_what_the_training_run_printed_at_its_end(
    ranks: RankPool, tmp_path: Path
) -> None:
    trained = run(ranks, tmp_path, save=tmp_path)
    of_validation, of_test = evaluations(trained)
    assert of_validation.startswith(" validation loss at iteration 6 on validation set | lm loss ")
    assert of_test.startswith(" validation loss at iteration 6 on test set | lm loss value: ")
    alone = run(ranks, tmp_path, skip_train=True, load=tmp_path, load_optimizer=False)
    assert evaluations(alone) == [of_validation, of_test]
    assert not losses(alone)
    assert "training is skipped" in alone


def test_evaluations_change_no_loss_and_read_on_in_their_data(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Two batches each: those at iterations 2, 4, 6 and at the end are all different."""
    without = run(ranks, tmp_path, sets=())
    between = run(ranks, tmp_path, interval=2)
    assert not evaluations(without)
    assert losses(between) == losses(without)
    where = [line.partition(" | ")[0].partition("at ")[2] for line in evaluations(between)]
    assert where == [
        "iteration 2",
        "iteration 4",
        "iteration 6",
        "iteration 6 on validation set",
        "iteration 6 on test set",
    ]
    read = [
        re.findall(r"\| (\w+ set, batches \d+ to \d+) \|", line) for line in evaluations(between)
    ]
    assert read == [
        ["validation set, batches 1 to 2"],
        ["validation set, batches 3 to 4"],
        ["validation set, batches 5 to 6"],
        ["validation set, batches 7 to 8"],
        ["test set, batches 1 to 2"],
    ]
    assert (
        evaluations(between)[2].partition("value")[2]
        != evaluations(between)[3].partition("value")[2]
    )


def test_a_run_that_stops_before_its_end_leaves_the_last_evaluations_to_the_next(
    ranks: RankPool, tmp_path: Path
) -> None:
    unbroken = run(ranks, tmp_path, interval=2)
    first = run(ranks, tmp_path, interval=2, exit_interval=3, save=tmp_path)
    second = run(ranks, tmp_path, interval=2, load=tmp_path)
    assert evaluations(first) + evaluations(second) == evaluations(unbroken)


@pytest.mark.parametrize("post_validation", [False, True])
def test_records_of_a_run_that_is_resumed(
    post_validation: bool, ranks: RankPool, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"interval": 3, "post_validation": post_validation, "jsonl": "run.jsonl"}
    said = run(ranks, tmp_path, exit_interval=4, save=tmp_path / "saved", **how)
    said += run(ranks, tmp_path, load=tmp_path / "saved", **how)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert len({line["run"] for line in lines}) == 1
    assert [(line["event"], line["iteration"]) for line in lines] == [
        ("start", 0),
        ("iterations", 2),
        ("evaluation", 3),
        ("iterations", 4),
        ("end", 4),
        ("start", 4),
        ("iterations", 6),
        ("evaluation", 6),
        ("evaluation", 6),
        ("evaluation", 6),
        ("end", 6),
    ]
    trained = [line for line in lines if line["event"] == "iterations"]
    assert [f"{line['lm_loss']:.6E}" for line in trained] == losses(said)
    for line in trained:
        assert line["consumed_tokens"] == line["consumed_samples"] * JOB.sequence
        assert line["tokens_per_second"] == pytest.approx(
            JOB.microbatches * JOB.sequence / line["seconds_per_iteration"]
        )
        assert [rank["rank"] for rank in line["ranks"]] == [0, 1]
        assert all(0 <= rank["idle"] < 1 and rank["peak_memory"] > 0 for rank in line["ranks"])
    ends = [line for line in lines if line["event"] == "end"]
    assert ends[0]["seconds_in_saves"] > 0
    assert all(end["seconds_in_evaluations"] > 0 for end in ends)


def test_records_that_cannot_be_written_are_told_once(ranks: RankPool, tmp_path: Path) -> None:
    """The file's folder is none."""
    (tmp_path / "file").touch()
    said = run(ranks, tmp_path, sets=(), log_interval=1, jsonl="file/run.jsonl")
    assert len(losses(said)) == JOB.iterations
    assert said.count("--log-jsonl") == 1
    assert "training goes on without these records" in said


def test_a_run_with_more_evaluations_than_planned_evaluates_the_same_samples_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six iterations were planned, and batches have become smaller since."""
    config = replace(JOB.config(LAYOUT).train, eval_interval=2, final_sets=BOTH)
    validation, log = Batches(JOB.batches()), Log(lambda text: None)
    begun: list[int] = []

    def evaluated(state: object, loader: Batches, batches: int) -> float:
        begun.append(loader.consumed_samples)
        return 1.0

    monkeypatch.setattr(evaluations_module, "evaluate", evaluated)
    data: Any = SimpleNamespace(train=Batches([]), validation={"validation": validation}, test=None)
    meter: Any = SimpleNamespace(paused=lambda what: nullcontext())
    state: Any = None
    made = Evaluations(config, state, data, meter, log)
    for iteration in range(12):
        if made.is_due(iteration):
            made.between(iteration)
    made.at_end(12)
    one = config.eval_iters * config.global_batch_size
    assert begun == [0, one, 2 * one, 3 * one, 0, one, 2 * one]
    assert evaluations_of_validation(config) == 4
