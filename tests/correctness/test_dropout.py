"""Dropout is drawn by layer and microbatch, so that no layout sees other random numbers."""

import pytest
from correctness.rank_runs import train_on_rank
from correctness.short_runs import LAYOUTS, Job, Layout
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions

JOB = Job(GPTOptions(num_layers=4, vocab_size=37), microbatches=3, iterations=4, dropout=0.3)


def losses(ranks: RankPool, job: Job, layout: Layout) -> list[float]:
    config, batches = job.config(layout), job.batches()
    return ranks.run(train_on_rank, layout.ranks, config=config, batches=batches)[0].losses


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> list[float]:
    return losses(ranks, JOB, LAYOUTS[0])


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_losses_with_dropout_do_not_depend_on_the_layout(
    layout: Layout, alone: list[float], ranks: RankPool
) -> None:
    assert losses(ranks, JOB, layout) == pytest.approx(alone, rel=1e-5)


def test_every_iteration_and_microbatch_drops_something_else(ranks: RankPool) -> None:
    """Without a learning rate, and with one microbatch again and again, all else is equal."""
    [[microbatch]] = Job(JOB.options, microbatches=1, iterations=1).batches()
    once, twice = (
        ranks.run(
            train_on_rank,
            1,
            config=Job(JOB.options, microbatches=m, iterations=3, dropout=0.3, lr=0.0).config(
                LAYOUTS[0]
            ),
            batches=[[microbatch] * m] * 3,
        )[0].losses
        for m in (1, 2)
    )
    assert len(set(once)) == 3
    # The first microbatch drops the same in both runs; if the second did too, so were the means.
    assert all(a != pytest.approx(b, rel=1e-4) for a, b in zip(once, twice, strict=True))
