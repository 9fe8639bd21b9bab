"""The answer to "which line for my GPUs?", as one JSON object."""

from typing import Any

from megatron.planning.answer import Answer, Proposal
from megatron.planning.asked.question import Question
from megatron.planning.launch_line import launch_line


def as_json(answer: Answer) -> dict[str, Any]:
    """Return an answer as one JSON object; docs/running.md lists its fields.

    Seconds are of an iteration, bytes of the fullest rank. What is not known is ``null``.
    """
    question, taken, unsplit = answer.question, answer.taken, answer.unsplit
    gains = taken.splits_vocabulary and unsplit is not None
    return {
        **job_json(question),
        "line": launch_line(question, taken.words),
        "words": [*question.words, *taken.words],
        "taken": way_json(question, taken)
        | {
            "bytes_by_rank": None
            if taken.forecast is None
            else list(map(round, taken.forecast.outcome.peak)),
            "seconds_by_reason": dict(taken.spent),
        },
        "unsplit": None if unsplit is None else way_json(question, unsplit),
        "split_gains": unsplit.seconds / taken.seconds - 1 if gains and unsplit else None,
        "runners_up": [way_json(question, way) for way in answer.runners_up],
        "obstacles": [
            way_json(question, way.proposal) | {"remedies": list(way.remedies)}
            for way in answer.obstacles
        ],
        "notes": list(question.notes),
        "effort": answer.effort,
    }


def job_json(question: Question) -> dict[str, Any]:
    """Return the job that a question is about."""
    gpus = question.gpus
    return {
        "model": None if question.model is None else str(question.model),
        "gpus": {
            "name": gpus.gpu.name,
            "count": gpus.count,
            "machines": gpus.machines,
            "per_machine": gpus.per_machine,
        },
        "batch": {
            "samples": question.global_batch_size,
            "seq_length": question.seq_length,
            "tokens": question.batch_tokens,
        },
        "tokens": question.tokens,
    }


def way_json(question: Question, way: Proposal) -> dict[str, Any]:
    """Return a way to run the job."""
    train, parallel = way.config.train, way.config.parallel
    speed = way.tokens_per_second(question)
    return {
        "words": list(way.words),
        "layout": way.sizes,
        "micro_batch_size": train.micro_batch_size,
        "microbatches": train.num_microbatches,
        "schedule": parallel.pipeline_schedule,
        "vocabulary": parallel.vocab_parallel,
        "planned": way.planned,
        "seconds": way.seconds,
        "tokens_per_second": speed,
        "tokens_per_second_per_gpu": speed / question.gpus.count,
        "mfu": way.mfu(question),
        "days": way.days(question),
        "bytes": round(way.peak),
        "bytes_left": round(way.left),
        "microbatches_in_flight": way.in_flight,
    }
