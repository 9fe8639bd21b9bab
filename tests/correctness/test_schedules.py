"""Every schedule with every treatment of the vocabulary trains the same model.

Losses, gradient norms, evaluations and gradients are those of the plain GPT in float64, whatever
runs where and when. All pairs are trained on two ranks, and every schedule on three, with every
treatment. With ``full`` all pairs are trained for longer on three or four ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
from correctness.rank_runs import RankRun, assemble, train_on_rank
from correctness.schedule_cases import (
    ITERATIONS,
    QUICK_ITERATIONS,
    all_pairs,
    all_pairs_of_more,
    each_once,
    job,
    layout,
)
from correctness.short_runs import Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import Parameters
from reference.plain_loss import loss_and_gradients
from reference.plain_training import Training

from megatron.planning.run_plan import make_run_plan
from megatron.schedules.catalogue import TRAINABLE_SCHEDULES
from megatron.schedules.held import in_flight
from megatron.schedules.treatments import TREATMENTS


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
            start = assemble([alone.initial])
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
        evaluate_after=(job.iterations - 1,),
    )


def evaluated(job: Job, final: Parameters) -> float:
    """The plain GPT's loss over all tokens of two batches, as ``eval_iters`` says, at ``final``."""
    weights = {name: value.double() for name, value in final.items()}
    return loss_and_gradients(weights, job.evaluated, job.options)[0]


def check(ranks: RankPool, expected: Callable[[Job], Expected], job: Job, layout: Layout) -> None:
    """Compare a run in ``layout`` with the plain GPT and with one rank."""
    by_rank, wanted = run(ranks, job, layout), expected(job)
    plan = make_run_plan(job.config(layout)).plan
    units = plan.chunks * plan.slices
    assert [own.peak_in_flight / units for own in by_rank] == in_flight(plan)
    assert [own.left_in_store for own in by_rank] == [0] * layout.ranks
    assert all(own.losses == by_rank[0].losses for own in by_rank)
    assert by_rank[0].losses == pytest.approx(wanted.alone.losses, rel=1e-5)
    assert by_rank[0].losses == pytest.approx(wanted.training.losses, rel=1e-5)
    assert by_rank[0].gradient_norms == pytest.approx(wanted.training.gradient_norms, rel=1e-5)
    final = assemble([own.final for own in by_rank])
    assert by_rank[0].evaluations == pytest.approx([evaluated(job, final)], rel=1e-6)
    gradients = assemble([own.first_gradients for own in by_rank])
    assert gradients.keys() == wanted.training.first_gradients.keys()
    errors = {
        name: float((gradients[name].double() - value).norm() / value.norm())
        for name, value in wanted.training.first_gradients.items()
    }
    assert max(errors.values()) < 1e-5, errors


def test_all_pairs_are_trained() -> None:
    """A new schedule or treatment is among them by itself."""
    pairs = {(schedule, treatment) for schedule, treatment, _, _ in all_pairs()}
    assert pairs == set(product(TRAINABLE_SCHEDULES, TREATMENTS))
    for sizes in (3,), (3, 4), (2, 3):
        cases = each_once(sizes)
        assert {schedule for schedule, *_ in cases} == {*TRAINABLE_SCHEDULES}
        assert {case[1:3] for case in cases} == set(product(TREATMENTS, sizes))
    more = all_pairs_of_more()
    assert {case[:2] for case in more} == pairs
    for factor, values in (0, TRAINABLE_SCHEDULES), (1, TREATMENTS):
        found = {(case[factor], *case[2:]) for case in more}
        assert found == set(product(values, (3, 4), (False, True)))


@pytest.mark.parametrize(
    ("schedule", "treatment", "p", "tied", "iterations"),
    [
        *((*case, QUICK_ITERATIONS) for case in all_pairs()),
        *((*case, QUICK_ITERATIONS) for case in each_once((3,))),
        *(full(*case, ITERATIONS) for case in all_pairs_of_more()),
    ],
)
def test_every_schedule_and_treatment(
    schedule: str,
    treatment: str,
    p: int,
    tied: bool,
    iterations: int,
    ranks: RankPool,
    expected: Callable[[Job], Expected],
    tmp_path: Path,
) -> None:
    check(ranks, expected, job(p, tied, iterations), layout(schedule, treatment, p, tmp_path))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, "vocab-2", "interleaved", group=3),
        Layout(2, "none", "interleaved", group=4, slices=2),
        full(Layout(2, "interlaced", "interleaved", group=3)),
        full(Layout(2, "vocab-1", "interleaved", group=8)),
    ],
    ids=str,
)
def test_groups_of_more_microbatches_than_ranks(
    layout: Layout, ranks: RankPool, expected: Callable[[Job], Expected]
) -> None:
    """The last of five microbatches, or the last two of ten slices, are a smaller group."""
    check(ranks, expected, job(layout.ranks, tied=True, iterations=QUICK_ITERATIONS), layout)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_an_embedding_alone_on_the_first_stage(
    schedule: str, ranks: RankPool, expected: Callable[[Job], Expected]
) -> None:
    """The first rank trains the embedding, and hands it on as it is."""
    layout = Layout(2, "none", schedule, first=0)
    check(ranks, expected, job(2, tied=True, iterations=QUICK_ITERATIONS), layout)
