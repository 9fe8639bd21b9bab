"""Runs of ranks held against the run of one process, and against other runs of the same ranks."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from correctness.rank_runs import (
    RankRun,
    assemble,
    check_agreement,
    check_copies,
    train_on_rank,
)
from correctness.short_runs import Job, Layout
from harness.rank_pool import RankPool
from reference.plain_gpt import Parameters
from reference.plain_training import Training

from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.schedules.held import in_flight
from megatron.schedules.lower import lower


def errors(found: Parameters, wanted: Parameters) -> dict[str, float]:
    """The norm of what is wrong with every tensor, relative to the norm of the tensor."""
    assert found.keys() == wanted.keys()
    return {
        name: float((found[name].double() - value).norm() / value.norm())
        for name, value in wanted.items()
    }


def joined(parameters: Parameters) -> torch.Tensor:
    """All tensors as one vector."""
    return torch.cat([parameters[name].double().flatten() for name in sorted(parameters)])


def trained(ranks: RankPool, job: Job, layout: Layout) -> list[RankRun]:
    """Train a job with an evaluation at its end, and check that its ranks agree.

    A rank must also hold what the plan says, and move activations if the layout says so.
    """
    config = job.config(layout)
    run_plan = make_run_plan(config)
    by_rank: list[RankRun] = ranks.run(
        train_on_rank,
        layout.world_size,
        config=config,
        batches=job.batches(),
        evaluation_batches=job.batches(seed=1),
        evaluate_after=(job.iterations - 1,),
        run_plan=run_plan,
    )
    check_agreement(by_rank)
    plan = run_plan.plan
    assert plan.slices == layout.slices
    assert plan.offloaded == min(layout.offloaded or 0, plan.chunks)
    copied = lower(plan, run_plan.costs)
    assert any(map(copied.copies, range(plan.ranks))) == (plan.offloaded > 0)
    peaks = {own.peak_in_flight / plan.chunks / plan.slices for own in by_rank}
    assert peaks == set(in_flight(plan))
    return by_rank


def check(by_rank: list[RankRun], expected: Training) -> None:
    """Check a run against the one of a single process, and copies against each other."""
    check_copies(by_rank)
    assert by_rank[0].losses == pytest.approx(expected.losses, rel=1e-5)
    for found, losses in zip(by_rank[0].depth_losses, expected.depth_losses, strict=True):
        assert found == pytest.approx(losses, rel=1e-5)
    assert by_rank[0].gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-5)
    gradients = assemble([own.first_gradients for own in by_rank])
    assert max(errors(gradients, expected.first_gradients).values()) < 1e-5
    final = assemble([own.final for own in by_rank])
    [whole] = errors({"": joined(final)}, {"": joined(expected.parameters)}).values()
    assert whole < 1e-5


def check_guesses(train: Callable[[RunConfig], list[RankRun]], config: RunConfig) -> None:
    """Check that post-validation changes no bit, although clipping makes some guesses wrong.

    Args:
        train: trains by a configuration, and returns the runs of all ranks.
        config: of the run without post-validation.
    """
    waited, guessed = (
        train(replace(config, optimizer=replace(config.optimizer, post_validation=guess)))
        for guess in (False, True)
    )
    assert any(norm > config.optimizer.clip_grad for norm in waited[0].gradient_norms)
    for own, other in zip(waited, guessed, strict=True):
        assert other.losses == own.losses
        assert other.depth_losses == own.depth_losses
        assert other.gradient_norms == own.gradient_norms
    one, another = (assemble([own.final for own in found]) for found in (waited, guessed))
    assert all(torch.equal(another[name], one[name]) for name in one)
