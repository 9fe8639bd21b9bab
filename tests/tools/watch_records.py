"""Records of runs as lines of a file, and a second, plain way to read them."""

import json
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Final

from hypothesis import strategies as st

SEQ_LENGTH: Final = 64
BATCH: Final = 16


def record(event: str, iteration: int, run: str = "a", **values: Any) -> dict[str, Any]:
    """Return a record; an iteration takes ten seconds."""
    made = datetime(2026, 11, 22, tzinfo=timezone.utc) + timedelta(seconds=10 * iteration)
    return {
        "event": event,
        "run": run,
        "time": made.isoformat(timespec="milliseconds"),
        "iteration": iteration,
        "consumed_samples": BATCH * iteration,
        **values,
    }


def start(iteration: int = 0, run: str = "a", **values: Any) -> dict[str, Any]:
    parallel = {
        "pipeline": {"pipeline_model_parallel_size": 2},
        "schedule": {"pipeline_schedule": "1f1b"},
        "treatment": {"vocab_parallel": "vocab-2"},
    }
    config = {"model": {"seq_length": SEQ_LENGTH}, "parallel": parallel}
    usual = {"train_iters": 100, "world_size": 2, "parameters": 3000, "config": config}
    return record("start", iteration, run, **{**usual, **values})


def interval(iteration: int, run: str = "a", **values: Any) -> dict[str, Any]:
    ranks = [
        {"rank": 0, "peak_memory": 1 << 30, "reserved_memory": None, "idle": 0.25,
         "idle_by_reason": {"stages": 0.125, "vocabulary": 0.125},
         "computing": {"F": 0.5, "B": 1.5}, "slowness": 1.25},
        {"rank": 1, "peak_memory": 3 << 30, "reserved_memory": None, "idle": 0.5,
         "idle_by_reason": {"stages": 0.5, "vocabulary": 0.0}, "slowness": None},
    ]  # fmt: skip
    slowest = {
        "rank": 0, "pipeline": 0, "tensor": 0, "context": 0, "data": 0, "slowness": 1.25,
        "seconds": 2.0, "usual": 1.6, "passes": "B", "passes_slowness": 1.5, "median": 1.75,
        "fastest": 1.5,
    }  # fmt: skip
    usual = {
        "consumed_tokens": SEQ_LENGTH * BATCH * iteration,
        "seconds_per_iteration": 2.0,
        "tflops_per_rank": 0.25,
        "mfu": 0.5,
        "tokens_per_second": 512.0,
        "learning_rate": 1e-3,
        "global_batch_size": BATCH,
        "lm_loss": 10 - iteration / 10,
        "grad_norm": 1.5,
        "skipped": 0,
        "nans": 0,
        "slowest": slowest,
        "ranks": ranks,
    }
    return record("iterations", iteration, run, **{**usual, **values})


def evaluation(iteration: int, run: str = "a", **values: Any) -> dict[str, Any]:
    usual = {"dataset": "validation", "at_end": False, "lm_loss": 11 - iteration / 10}
    return record("evaluation", iteration, run, **{**usual, **values})


def generation(iteration: int, run: str = "a", **values: Any) -> dict[str, Any]:
    texts = [
        {"prompt": "Once upon", "text": f" a time {iteration}", "tokens": [1, 2]},
        {"prompt": "", "text": "3 mice\n", "tokens": [3]},
    ]
    return record("generation", iteration, run, **{"seconds": 1.0, "texts": texts, **values})


def lines(records: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(f"{json.dumps(own)}\n".encode() for own in records)


def write(path: Path, *records: Mapping[str, Any]) -> Path:
    path.write_bytes(lines(records))
    return path


EVENTS: Final = st.one_of(
    st.builds(start, st.integers(0, 30), st.sampled_from("ab")),
    st.builds(
        lambda at, run, loss: interval(at, run, lm_loss=loss),
        st.integers(0, 30), st.sampled_from("ab"), st.none() | st.floats(-9, 9),
    ),
    st.builds(
        lambda at, run, loss: evaluation(at, run, lm_loss=loss),
        st.integers(0, 30), st.sampled_from("ab"), st.floats(-9, 9),
    ),
    st.builds(generation, st.integers(0, 30), st.sampled_from("ab")),
)  # fmt: skip
"""Starts, intervals, evaluations and texts of two runs, in no order that a run would have."""


def plainly_read(
    records: Iterable[Mapping[str, Any]], event: str, field: str
) -> dict[str, dict[int, float]]:
    """Return a field of all records of an event that still count, by run and iteration.

    The definition of docs/metrics.md: a start goes back to its iteration, and of two records with
    one iteration the later one counts. A run that goes on without a start has been cut off.
    """
    runs: dict[str, dict[int, Any]] = {}
    for own in records:
        kept = runs.setdefault(own["run"], {})
        if own["event"] == "start":
            for iteration in [at for at in kept if at > own["iteration"]]:
                del kept[iteration]
        elif own["event"] == event:
            for iteration in [at for at in kept if at >= own["iteration"]]:
                del kept[iteration]
            kept[own["iteration"]] = own[field]
    known = {run: {at: v for at, v in kept.items() if v is not None} for run, kept in runs.items()}
    return {run: dict(sorted(kept.items())) for run, kept in known.items()}
