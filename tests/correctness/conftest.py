"""What tests of layouts compare with, and ranks for the largest of them."""

from collections.abc import Callable, Iterator

import pytest
from correctness.rank_runs import assemble, train_on_rank
from correctness.short_runs import Job, Layout
from harness.rank_pool import RankPool
from harness.shared_plans import shared_plans
from reference.plain_training import Training


@pytest.fixture(scope="module", autouse=True)
def plans_are_shared() -> Iterator[None]:
    with shared_plans():
        yield


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[RankPool]:
    with RankPool(8) as pool:
        yield pool


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> Callable[[Job], Training]:
    """What one process makes of a job, in plain PyTorch and float64."""
    done: dict[Job, Training] = {}

    def of(job: Job) -> Training:
        if job not in done:
            config = job.config(Layout(1, "none"))
            [own] = ranks.run(train_on_rank, 1, config=config, batches=job.batches()[:1])
            initial = assemble([own.initial])
            done[job] = job.reference({name: value.double() for name, value in initial.items()})
        return done[job]

    return of
