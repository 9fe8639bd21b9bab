"""Records as a run makes them, for those that take them."""

from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions

from megatron.training.metrics.records import (
    Ended,
    Evaluation,
    Generated,
    GeneratedText,
    Interval,
    RankFigures,
    Started,
    Step,
    perplexity,
)

TIME = datetime(2026, 11, 22, 12, 0, 0, tzinfo=timezone.utc)
CONFIG = Job(GPTOptions(vocab_size=61)).config(Layout(2, "vocab-2"))


def started(iteration: int = 0) -> Started:
    return Started(TIME, iteration, 8 * iteration, 100, 2, 3000, 10**9, 0.5, CONFIG)


def step(iteration: int, **changes: Any) -> Step:
    """An iteration of 8 samples."""
    loss = 10 - iteration / 10
    return replace(Step(iteration, 100, 8 * iteration, 2.0, 1e-3, 8, loss, 1.5), **changes)


def interval(iteration: int, **changes: Any) -> Interval:
    plain = Interval(
        time=TIME,
        iteration=iteration,
        train_iters=100,
        consumed_samples=8 * iteration,
        consumed_tokens=80 * iteration,
        seconds_per_iteration=2.0,
        tflops_per_rank=0.25,
        mfu=0.5,
        tokens_per_second=40.0,
        learning_rate=1e-3,
        global_batch_size=8,
        lm_loss=10 - iteration / 10,
        grad_norm=1.5,
        ranks=(RankFigures(0, 1000, None, 0.125), RankFigures(1, 3000, None, 0.375)),
    )
    return replace(plain, **changes)


def evaluation(iteration: int, **changes: Any) -> Evaluation:
    plain = Evaluation(
        TIME, iteration, 8 * iteration, "validation", False, 2.0, perplexity(2.0), 0.5
    )
    return replace(plain, **changes)


def ended(iteration: int) -> Ended:
    return Ended(TIME, iteration, 8 * iteration, 80 * iteration, 1.0, 2.0)


def generated(iteration: int) -> Generated:
    """Two texts, one of them behind the end of a document."""
    texts = (
        GeneratedText("Once\nupon", " a `time`", (4, 5)),
        GeneratedText("", "mice\u200b", (6,)),
    )
    return Generated(TIME, iteration, 8 * iteration, 0.5, texts)
