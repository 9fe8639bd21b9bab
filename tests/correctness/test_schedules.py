"""Every schedule with every treatment of the vocabulary trains the same model.

Losses, gradient norms, evaluations and gradients are those of the plain GPT in float64, whatever
runs where and when. A sparse cover here, the whole cross product with ``full``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
from correctness.job import Job, Layout
from correctness.rank_runs import RankRun, assemble, train_on_rank
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions, Parameters
from reference.plain_loss import loss_and_gradients
from reference.plain_training import Training

from megatron.schedules.memory import in_flight
from megatron.training.run_plan import make_run_plan

SCHEDULES = (
    "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-auto", "zb-v", "v-half",
    "v-min", "auto", "file",
)  # fmt: skip
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
    if schedule == "zb-auto":
        return replace(made, memory_limit=ranks + 2.0)
    if schedule != "file":
        return made
    like = Layout(ranks, treatment, "zb-v")
    plan = make_run_plan(job(ranks, tied=False).config(like)).plan
    rows = tuple(_fillers_last(row) for row in plan.rows)
    file = folder / f"{treatment}-{ranks}.plan"
    file.write_text(replace(plan, rows=rows).to_text())
    return replace(made, file=file)


def _fillers_last(row: Sequence) -> tuple:
    return (*(p for p in row if p.kind != "W"), *(p for p in row if p.kind == "W"))


def sparse_cover() -> list[tuple[str, str, int, bool]]:
    """(schedule, treatment, ranks, tied): every two of the first three meet somewhere."""
    cases = []
    for index, (schedule, treatment) in enumerate(product(SCHEDULES, TREATMENTS)):
        row, column = divmod(index, len(TREATMENTS))
        if (row + column) % 2 == 0:
            cases.append((schedule, treatment, 2 + (row + column // 2) % 3, row % 3 == 0))
    return cases


def full_cross_product() -> list[tuple[str, str, int, bool]]:
    return list(product(SCHEDULES, TREATMENTS, (2, 3, 4), (False, True)))


@dataclass(frozen=True)
class Expected:
    """What the plain GPT makes of a job in float64, from the framework's initial weights.

    Attributes:
        training: losses, norms and gradients.
        alone: the framework's own run on one rank.
    """

    training: Training
    alone: RankRun


@pytest.fixture(scope="module")
def expected(ranks: RankPool) -> Callable[[Job], Expected]:
    """The reference of every job, made once."""
    done: dict[Job, Expected] = {}

    def of(job: Job) -> Expected:
        if job not in done:
            [alone] = run(ranks, job, Layout(1, "none"))
            start = assemble([alone.initial], job.options.vocab_size)
            done[job] = Expected(
                job.reference({name: value.double() for name, value in start.items()}), alone
            )
        return done[job]

    return of


def run(ranks: RankPool, job: Job, layout: Layout) -> list[RankRun]:
    """Train and, after the last iteration, evaluate."""
    return ranks.run(
        train_on_rank,
        layout.ranks,
        config=job.config(layout),
        batches=job.batches(),
        evaluation_batches=job.batches(seed=1),
        evaluate_after=(ITERATIONS - 1,),
    )


def evaluated(job: Job, final: Parameters) -> float:
    """The plain GPT's loss over two batches, as ``eval_iters`` says, with these weights."""
    weights = {name: value.double() for name, value in final.items()}
    losses = [loss_and_gradients(weights, b, job.options)[0] for b in job.batches(seed=1)[:2]]
    return sum(losses) / 2


def check(ranks: RankPool, expected: Callable[[Job], Expected], job: Job, layout: Layout) -> None:
    """Compare a run in ``layout`` with the plain GPT and with one rank."""
    by_rank, wanted = run(ranks, job, layout), expected(job)
    plan = make_run_plan(job.config(layout)).plan
    assert [own.peak_in_flight / plan.chunks for own in by_rank] == in_flight(plan)
    assert [own.left_in_store for own in by_rank] == [0] * layout.ranks
    assert all(own.losses == by_rank[0].losses for own in by_rank)
    assert by_rank[0].losses == pytest.approx(wanted.alone.losses, rel=1e-5)
    assert by_rank[0].losses == pytest.approx(wanted.training.losses, rel=1e-5)
    assert by_rank[0].gradient_norms == pytest.approx(wanted.training.gradient_norms, rel=1e-5)
    final = assemble([own.final for own in by_rank], job.options.vocab_size)
    assert by_rank[0].evaluations == pytest.approx([evaluated(job, final)], rel=1e-6)
    gradients = assemble([own.first_gradients for own in by_rank], job.options.vocab_size)
    assert gradients.keys() == wanted.training.first_gradients.keys()
    errors = {
        name: float((gradients[name].double() - value).norm() / value.norm())
        for name, value in wanted.training.first_gradients.items()
    }
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize(("schedule", "treatment", "p", "tied"), sparse_cover())
def test_every_schedule_and_treatment(
    schedule: str,
    treatment: str,
    p: int,
    tied: bool,
    ranks: RankPool,
    expected: Callable[[Job], Expected],
    tmp_path: Path,
) -> None:
    check(ranks, expected, job(p, tied), layout(schedule, treatment, p, tmp_path))


@pytest.mark.full
@pytest.mark.parametrize(("schedule", "treatment", "p", "tied"), full_cross_product())
def test_the_whole_cross_product(
    schedule: str,
    treatment: str,
    p: int,
    tied: bool,
    ranks: RankPool,
    expected: Callable[[Job], Expected],
    tmp_path: Path,
) -> None:
    check(ranks, expected, job(p, tied), layout(schedule, treatment, p, tmp_path))
