"""The answer to "which line for my GPUs?", in words."""

from collections.abc import Iterator, Mapping
from typing import Final

from megatron.flags.words import split
from megatron.planning.answer import Answer, Proposal
from megatron.planning.asked.question import Question
from megatron.planning.checked_runs import checked
from megatron.planning.launch_line import launch_line
from megatron.planning.where_time_goes import Reason
from megatron.schedules.counted import counted
from megatron.simulator.units import MEMORY, TIME, percent


def report(answer: Answer) -> Iterator[str]:
    """Yield the paragraphs of an answer."""
    question, taken = answer.question, answer.taken
    yield "\n".join(
        [_job(question, taken), *question.notes, *([answer.effort] * bool(answer.effort))]
    )
    yield "\n".join([_figures(question, taken), *_memory(taken), _split(answer)])
    if taken.forecast is not None:
        yield checked(taken.forecast)
        yield "\n".join(_reasons(taken))
    if taken.config.parallel.pairs.joins:
        yield _UNMEASURED_PAIRS
    if answer.runners_up:
        yield "\n".join(
            [
                "the next best ways (difference in time; memory of the fullest rank):",
                *_table(answer),
            ]
        )
    if answer.obstacles:
        yield "\n".join(["faster ways that do not fit:", *_obstacles(answer)])
    if taken.config.notes:
        yield "\n".join(taken.config.notes)
    yield f"the line to run:\n\n{launch_line(question, taken.words)}"


_UNMEASURED_PAIRS: Final = (
    "passes run in pairs (--tp-comm-overlap, --overlap-moe-expert-parallel-comm): no GPU has run "
    "pairs with this code, and their predicted time takes passes beside collectives to be as fast "
    "as alone; measure with and without"
)


def _job(question: Question, taken: Proposal) -> str:
    """Return the job that was asked about."""
    model = taken.config.model
    experts = f", {model.experts.num_experts} experts" if model.experts.num_experts else ""
    length = "" if question.tokens is None else f", {_many(question.tokens)} tokens in all"
    return (
        f"{question.model or 'a model by its flags'}: {counted(model.num_layers, 'layer')}, "
        f"hidden size {model.hidden_size:,}{experts}, vocabulary {model.vocab_size:,}; on "
        f"{question.gpus}; {counted(question.global_batch_size, 'sample')} of "
        f"{question.seq_length:,} tokens an iteration{length}"
    )


_SIZES: Final = frozenset(
    {
        *("--tensor-model-parallel-size", "--sequence-parallel", "--context-parallel-size"),
        *("--pipeline-model-parallel-size", "--expert-model-parallel-size", "--dry-run-replicas"),
    }
)
"""Flags that the letters of a layout stand for."""


def layout(proposal: Proposal) -> str:
    """Return a layout in letters, as ``t 4, p 8, d 2``; sizes of 1 are left out."""
    sizes = [f"{letter} {size}" for letter, size in proposal.sizes.items() if size > 1]
    return ", ".join(sizes) or "one GPU"


def named(proposal: Proposal, beside: Proposal | None = None) -> str:
    """Return a way in short: its layout, and its other flags if they differ from another way's.

    Flags of the other way that this one lacks are named too.
    """
    own, other = _flags(proposal), {} if beside is None else _flags(beside)
    words = [
        " ".join([option, *values])
        for option, values in own.items()
        if option not in _SIZES and other.get(option) != values
    ]
    words += [f"no {option}" for option in other if option not in own and option not in _SIZES]
    return ", ".join([layout(proposal), *words])


def _flags(proposal: Proposal) -> dict[str, list[str]]:
    return dict(split(list(proposal.words)))


def _figures(question: Question, taken: Proposal) -> str:
    """Return time, speed and length of the training."""
    speed, days = taken.tokens_per_second(question), taken.days(question)
    train = "" if days is None else f"; {_many(question.tokens or 0)} tokens take {days:.3g} days"
    microbatches = counted(taken.config.train.num_microbatches, "microbatch")
    return (
        f"{named(taken)}\n"
        f"{TIME.write(taken.seconds)} an iteration ({microbatches} on every replica): "
        f"{speed:,.0f} tokens/s, {speed / question.gpus.count:,.0f} a GPU; "
        f"MFU {percent(taken.mfu(question))}{train}"
    )


def _many(tokens: int) -> str:
    """Return a number of tokens in short, as 1.5T."""
    size, letter = next(
        ((size, letter) for letter, size in _LETTERS.items() if tokens >= size), (1, "")
    )
    return f"{tokens / size:.4g}{letter}"


_LETTERS: Final = {"T": 10**12, "B": 10**9, "M": 10**6, "k": 10**3}


def _memory(taken: Proposal) -> Iterator[str]:
    """Yield lines on the memory of all ranks."""
    yield (
        f"memory: the fullest rank holds {MEMORY.write(taken.peak)} of the "
        f"{MEMORY.write(taken.room)} that tensors can use; {MEMORY.write(taken.left)} are left"
    )
    if taken.forecast is not None and len(peaks := taken.forecast.outcome.peak) > 1:
        unit = MEMORY.unit(max(peaks))
        shown = " ".join(MEMORY.number(peak, unit) for peak in peaks)
        yield f"{unit.name} by pipeline rank: {shown}"


def _split(answer: Answer) -> str:
    """Return what splitting the vocabulary gains."""
    taken, other = answer.taken, answer.unsplit
    if not taken.splits_vocabulary:
        return "the vocabulary is not split: no way that splits it was found to be faster"
    if other is None:
        return "without a split vocabulary no way was found that fits"
    gain, saved = other.seconds / taken.seconds - 1, other.peak - taken.peak
    less = f"{MEMORY.write(abs(saved))} {'less' if saved > 0 else 'more'} on the fullest rank"
    return (
        f"without a split vocabulary: {TIME.write(other.seconds)}, {MEMORY.write(other.peak)} "
        f"({named(other, taken)}); the split makes the job {percent(gain)} faster, with {less}"
    )


_WORDS: Final[Mapping[Reason, str]] = {
    "products": "matrix products",
    "attention": "attention",
    "other kernels": "other kernels, which move bytes",
    "tensor": "waiting for tensor-parallel ranks",
    "context": "waiting for context-parallel ranks",
    "experts": "waiting for tokens to travel to experts and back",
    "vocabulary": "waiting for collectives of the vocabulary",
    "replicas": "waiting for replicas: gradients and parameters",
    "transfers": "waiting for messages between stages",
    "host": "waiting for copies to and from the host",
    "crowding": "passes that are slower beside a collective",
    "idle": "idle: other ranks still have work to do",
    "optimizer's step": "the optimizer's step",
}


def _reasons(taken: Proposal) -> Iterator[str]:
    """Yield where the seconds of an iteration go, the most first."""
    yield "where the seconds go, on average over the ranks:"
    for words, seconds in in_words(taken.spent):
        yield f"{_number(seconds):>10} s {seconds / taken.seconds:6.1%}  {words}"


def in_words(spent: Mapping[Reason, float]) -> Iterator[tuple[str, float]]:
    """Yield each reason in words with its seconds, the most first; tiny shares are left out."""
    whole = sum(spent.values())
    for reason, seconds in sorted(spent.items(), key=lambda own: -own[1]):
        if seconds > _LEAST * whole:
            yield _WORDS[reason], seconds


_LEAST: Final = 5e-4
"""Share of an iteration below which a reason is left out."""


def _number(seconds: float) -> str:
    return f"{seconds:.3f}"


def _table(answer: Answer) -> Iterator[str]:
    """Yield a line on each runner-up, with what it loses."""
    for other in answer.runners_up:
        more = other.seconds / answer.taken.seconds - 1
        about = "" if other.planned else ", estimated"
        yield (
            f"{_number(other.seconds):>10} s {more:+6.1%} {MEMORY.write(other.peak):>10}{about}  "
            f"{named(other, answer.taken)}"
        )


def _obstacles(answer: Answer) -> Iterator[str]:
    """Yield a line on each faster way that does not fit, with what it lacks and what would help."""
    for obstacle in answer.obstacles:
        way, taken = obstacle.proposal, answer.taken
        less = 1 - way.seconds / taken.seconds
        helps = f": {', '.join(obstacle.remedies)}" if obstacle.remedies else ""
        yield (
            f"{named(way, taken)} would take {TIME.write(way.seconds)}, {percent(less)} less, and "
            f"lacks {MEMORY.write(-way.left)}{helps}"
        )
