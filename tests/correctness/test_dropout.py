"""Dropout is drawn by layer and microbatch, so that no layout sees other random numbers."""

from datetime import timedelta

import pytest
import torch
from correctness.rank_runs import CPU, RankRun, train_on_rank
from correctness.short_runs import LAYOUTS, Job, Layout
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions

from megatron.layers.main_grad import main_grad_of
from megatron.parallel.grid import Grid
from megatron.parallel.groups import make_groups
from megatron.runtime.batch import to_device
from megatron.training.setup import build_train_state

JOB = Job(GPTOptions(num_layers=4, vocab_size=37), microbatches=3, iterations=4, dropout=0.3)


def losses(ranks: RankPool, job: Job, layout: Layout) -> list[float]:
    config, batches = job.config(layout), job.batches()
    run: RankRun = ranks.run(train_on_rank, layout.ranks, config=config, batches=batches)[0]
    return run.losses


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> list[float]:
    return losses(ranks, JOB, LAYOUTS[0])


@pytest.mark.one_in(2)
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


def gradients_on_rank(rank: int, world_size: int, *, dropout: float) -> torch.Tensor:
    """Gradients of four microbatches that the ranks share as replicas, in Megatron's order."""
    m = 4 // world_size
    batch = Job(JOB.options, microbatches=4, iterations=1).batches()[0][rank::world_size]
    groups = make_groups(Grid(data_size=world_size), CPU, timedelta(seconds=60))
    layout = Layout(1, "none", replicas=world_size)
    config = Job(JOB.options, microbatches=m * world_size, dropout=dropout).config(layout)
    state = build_train_state(config, groups)
    state.pipeline.train(to_device(batch, CPU, replicas=world_size), 0)
    state.pipeline.close()
    return torch.cat([main_grad_of(entry.parameter).flatten() for entry in state.parameters])


def test_replicas_drop_what_one_rank_drops_in_the_same_microbatches(ranks: RankPool) -> None:
    [alone] = ranks.run(gradients_on_rank, 1, dropout=0.3)
    for shared in ranks.run(gradients_on_rank, 2, dropout=0.3):
        torch.testing.assert_close(shared, alone, rtol=1e-4, atol=1e-5)
    [without] = ranks.run(gradients_on_rank, 1, dropout=0.0)
    assert not torch.allclose(without, alone, rtol=1e-2, atol=1e-3)
