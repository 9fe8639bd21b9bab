"""progress.txt as Megatron-LM writes it, and its throughput over several jobs."""

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from training.metrics.made_records import started, step

from megatron.training.metrics.progress_file import FILE, Origin, ProgressFile, origin
from megatron.training.metrics.records import Saved, SaveEvent

TIME = datetime(2026, 11, 22, 12, 0, 0).astimezone()
HEAD = "2026-11-22 12:00:{}\tJob ID: 42\t# GPUs: 2\t"
PER_SAMPLE = 10**13
BATCH = started().config.train.global_batch_size


def job(folder: Path, begun: int, samples: int, saved: int, event: SaveEvent) -> None:
    """A job that starts at a second, after some samples, and saves ten seconds later."""
    file = ProgressFile(folder)
    begin = replace(
        started(), time=TIME + timedelta(seconds=begun), flops=PER_SAMPLE * BATCH, world_size=2
    )
    file.write(replace(begin, consumed_samples=samples))
    file.write(step(1))
    end = begin.time + timedelta(seconds=10)
    file.write(Saved(end, event, saved // BATCH, saved))
    file.close(failed=False)


def test_a_line_for_every_start_and_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    job(tmp_path, 0, 0, 20, "Saved checkpoint")
    job(tmp_path, 30, 20, 60, "Saved async checkpoint")
    lines = (tmp_path / FILE).read_text().splitlines()
    tokens = started().config.model.seq_length
    assert lines == [
        HEAD.format("00") + "Starting job",
        HEAD.format("10") + "Saved checkpoint\t"
        f"Iteration: {20 // BATCH}\tJob throughput: 10.0 TFLOP/s/GPU\t"
        "Cumulative throughput: 10.0 TFLOP/s/GPU\tFloating-point operations: 2.00e+14\t"
        f"Tokens (in billions): {20 * tokens / 1e9:.2f}",
        HEAD.format("30") + "Starting job",
        HEAD.format("40") + "Saved async checkpoint\t"
        f"Iteration: {60 // BATCH}\tJob throughput: 20.0 TFLOP/s/GPU\t"
        "Cumulative throughput: 7.5 TFLOP/s/GPU\tFloating-point operations: 6.00e+14\t"
        f"Tokens (in billions): {60 * tokens / 1e9:.2f}",
    ]


def test_a_save_that_has_begun_has_no_figures(tmp_path: Path) -> None:
    job(tmp_path, 0, 0, 20, "Saving async checkpoint")
    last = (tmp_path / FILE).read_text().splitlines()[-1]
    assert last.split("\t")[3:] == ["Saving async checkpoint", f"Iteration: {20 // BATCH}"]


def test_jobs_of_other_sizes_do_not_count() -> None:
    own = Origin(TIME, 5.0)
    lines = [
        HEAD.format("00").replace("2\t", "4\t") + "Starting job",
        HEAD.format("10").replace("2\t", "4\t") + "Saved\tx\tFloating-point operations: 7\ty",
        "a line of somebody else",
        HEAD.format("20") + "Starting job",
        HEAD.format("30") + "Starting job",
    ]
    assert origin(lines, 2, own) == Origin(TIME + timedelta(seconds=20), 7.0)
    assert origin(lines, 8, own) == own
    assert origin(lines[:2], 2, own) == own
