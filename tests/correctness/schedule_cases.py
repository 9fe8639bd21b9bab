"""Every schedule with every treatment of the vocabulary: the cases that a test may pick from."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions

from megatron.planning.run_plan import make_run_plan
from megatron.schedules.catalogue import TRAINABLE_SCHEDULES, TRAITS
from megatron.schedules.passes import Pass
from megatron.schedules.treatments import TREATMENTS

ITERATIONS = 4
QUICK_ITERATIONS = 2
"""They have no warm-up, whose first rate is 0: so the second loss is of weights that were updated,
and evaluations after it are of two updates."""


def job(ranks: int, tied: bool, iterations: int = ITERATIONS) -> Job:
    """A job with a layer for each of two chunks of every rank."""
    options = GPTOptions(
        num_layers=2 * ranks, vocab_size=37, tie_embeddings=tied, label_smoothing=0.1
    )
    warmup = 0 if iterations == QUICK_ITERATIONS else iterations // 2
    return Job(options, microbatches=5, masked_out=(1,), iterations=iterations, warmup=warmup)


def layout(schedule: str, treatment: str, ranks: int, folder: Path) -> Layout:
    """The layout of a case; the plan of ``file`` is one that no other schedule has."""
    made = Layout(ranks, treatment, schedule)
    if TRAITS[schedule].needs_memory_limit:
        return replace(made, memory_limit=ranks + 2.0)
    if schedule != "file":
        return made
    like = Layout(ranks, treatment, "zb-v")
    plan = make_run_plan(job(ranks, tied=False).config(like)).plan
    rows = tuple(_fillers_last(row) for row in plan.rows)
    file = folder / f"{treatment}-{ranks}.plan"
    file.write_text(replace(plan, rows=rows).to_text())
    return replace(made, file=file)


def _fillers_last(row: Sequence[Pass]) -> tuple[Pass, ...]:
    return (*(p for p in row if p.kind != "W"), *(p for p in row if p.kind == "W"))


Case = tuple[str, str, int, bool]
"""Schedule, treatment, ranks, and whether the embeddings are tied."""


def all_pairs() -> list[Case]:
    """Every schedule with every treatment on two ranks, the embeddings tied in half of them."""
    pairs = product(enumerate(TRAINABLE_SCHEDULES), enumerate(TREATMENTS))
    return [
        (schedule, treatment, 2, (row + column) % 2 == 0)
        for (row, schedule), (column, treatment) in pairs
    ]


def each_once(sizes: Sequence[int]) -> list[Case]:
    """Every schedule on one of so many ranks, and every treatment on each of them."""
    schedules, treatments, n = TRAINABLE_SCHEDULES, tuple(TREATMENTS), len(sizes)
    return [
        (
            schedules[row % len(schedules)],
            treatments[row // n % len(treatments)],
            sizes[row % n],
            row % (2 * n) < n,
        )
        for row in range(max(len(schedules), n * len(treatments)))
    ]


def all_pairs_of_more() -> list[Case]:
    """Every schedule with every treatment on three or four ranks.

    Every schedule, and every treatment, has either number with tied and with untied embeddings.
    """
    places = [(3, False), (4, False), (3, True), (4, True)]
    pairs = product(enumerate(TRAINABLE_SCHEDULES), enumerate(TREATMENTS))
    return [
        (schedule, treatment, *places[(row + column) % len(places)])
        for (row, schedule), (column, treatment) in pairs
    ]


def kinds_with_treatments() -> list[Case]:
    """Every kind of schedule with every treatment on two ranks, and every schedule.

    Schedules of a kind have the same number of chunks of a rank, and W apart or not, and pairs or
    not: their ranks run the same passes, in another order.
    """
    kinds: dict[tuple[object, ...], list[str]] = {}
    for schedule in TRAINABLE_SCHEDULES:
        of = TRAITS[schedule]
        kinds.setdefault((of.chunks, of.split, of.pairs), []).append(schedule)
    treatments = tuple(TREATMENTS)
    return [
        (kind[row % len(kind)], treatments[row % len(treatments)], 2, (row + number) % 2 == 0)
        for number, kind in enumerate(kinds.values())
        for row in range(max(len(kind), len(treatments)))
    ]
