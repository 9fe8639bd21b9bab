"""Dropout is drawn by layer and microbatch, so that no layout sees other random numbers."""

import pytest
import torch
import torch.distributed as dist
from correctness.rank_runs import CPU, RankRun, train_on_rank
from correctness.short_runs import LAYOUTS, Job, Layout
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions

from megatron.layers.main_grad import main_grad_of
from megatron.parallel.grid import Grid
from megatron.parallel.groups import connect_grid
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


def gradients(replicas: int, replica: int) -> torch.Tensor:
    """One replica's share of a batch of four microbatches, in Megatron's order."""
    m = 4 // replicas
    batch = Job(JOB.options, microbatches=4, iterations=1).batches()[0][replica::replicas]
    groups = connect_grid(
        Grid(data_size=replicas),
        replica,
        CPU,
        (0, 0),
        lambda use, tiling: dist.ProcessGroup(dist.HashStore(), 0, 1),
    )
    config = Job(JOB.options, microbatches=m, dropout=0.3).config(LAYOUTS[0])
    state = build_train_state(config, groups)
    state.pipeline.train(to_device(batch, CPU, replicas=replicas), 0)
    return torch.cat([main_grad_of(entry.parameter).flatten() for entry in state.parameters])


def test_replicas_drop_what_one_rank_drops_in_the_same_microbatches() -> None:
    of_both = gradients(2, 0) + gradients(2, 1)
    torch.testing.assert_close(of_both, gradients(1, 0), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(2 * gradients(2, 0), of_both, rtol=1e-2, atol=1e-3)
