"""Every schedule with every treatment of the vocabulary: the cases that a test may pick from."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions

from megatron.schedules.catalogue import TRAINABLE_SCHEDULES, TRAITS
from megatron.schedules.passes import Pass
from megatron.training.planning.run_plan import make_run_plan

TREATMENTS = ("none", "redis", "naive", "vocab-1", "vocab-2", "interlaced")
ITERATIONS = 10


def job(ranks: int, tied: bool) -> Job:
    """A job whose layers can be spread over two chunks of every rank."""
    options = GPTOptions(
        num_layers=6 if ranks == 3 else 8, vocab_size=37, tie_embeddings=tied, label_smoothing=0.1
    )
    return Job(options, microbatches=5, masked_out=(1,), iterations=ITERATIONS, warmup=2)


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


def sparse_cover() -> list[tuple[str, str, int, bool]]:
    """(schedule, treatment, ranks, tied): every two of the first three meet somewhere."""
    cases = []
    for index, (schedule, treatment) in enumerate(product(TRAINABLE_SCHEDULES, TREATMENTS)):
        row, column = divmod(index, len(TREATMENTS))
        if (row + column) % 2 == 0:
            cases.append((schedule, treatment, 2 + (row + column // 2) % 3, row % 3 == 0))
    return cases


def full_cross_product() -> list[tuple[str, str, int, bool]]:
    return list(product(TRAINABLE_SCHEDULES, TREATMENTS, (2, 3, 4), (False, True)))
