"""A parameter's gradient is summed over the ranks that its ownership names, in every layout.

Every second replica shares the MLP of the second layer with every second one only, so there are two
of these MLPs. The reference is a plain GPT in float64 that takes one for the even microbatches and
the other for the odd ones, as replicas take microbatches in turn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from correctness.agreement import errors
from correctness.rank_runs import (
    Batches,
    RankRun,
    assemble,
    check_agreement,
    check_copies,
    train_on_rank,
)
from correctness.short_runs import Layout
from correctness.test_optimizers import JOB as LONG_JOB
from correctness.test_optimizers import muon_of
from harness.marks import full
from harness.rank_pool import RankPool
from reference import plain_training
from reference.plain_gpt import GPTOptions, Parameters
from reference.plain_loss import Microbatch, count_valid_tokens, losses_and_gradients
from reference.plain_training import Training

from megatron.model.ownership import OwnedParameter
from megatron.model.stage import RankModel
from megatron.parallel.groups import ConnectedAxis
from megatron.run.run_config import RunConfig

# AdamW divides by the root of squares. With a larger epsilon, rounding of the smallest gradients
# moves no weight far.
ADAMW = replace(LONG_JOB.adamw, adam_eps=1e-5)
JOB = replace(LONG_JOB, iterations=3, warmup=1, masked_out=(1,), adamw=ADAMW)
MUON = muon_of(nesterov=False, adam_eps=ADAMW.adam_eps)
SHARED, HALF = ".layers.1.mlp.", ".layers.1.mlp.half{}."
FOUR = Layout(1, "none", replicas=4)
CASES = [
    (FOUR, False),
    (replace(FOUR, sharded=True, overlap=True, bucket_size=500), False),
    full(replace(FOUR, overlap=True), True),
    (replace(FOUR, sharded=True), True),
    (Layout(2, "vocab-2", "zb-h1", replicas=2), False),
    full(Layout(2, "vocab-1", "zb-v", replicas=2, sharded=True, overlap=True), True),
]


def train_halves(
    rank: int, world_size: int, *, config: RunConfig, batches: Batches, axis: bool = True
) -> RankRun:
    """Train with two MLPs; without ``axis`` their gradients are summed over all replicas."""
    grid, pipeline = config.parallel.grid, config.parallel.pipeline.size
    of_replicas = grid.groups("data")
    half, own = 0, ConnectedAxis("half", 0, (rank,))
    for ranks in of_replicas:
        for which in range(2):
            members = list(ranks[which::2])
            group = dist.new_group(members)
            if rank in members:
                half, own = which, ConnectedAxis("half", members.index(rank), tuple(members), group)
    assert own.size * 2 * pipeline == world_size
    owned_parameters = RankModel.owned_parameters

    def renamed(model: RankModel) -> Iterator[OwnedParameter]:
        for owned in owned_parameters(model):
            if SHARED not in owned.name:
                yield owned
                continue
            name = owned.name.replace(SHARED, HALF.format(half))
            yield replace(owned, name=name, axis=own if axis else None)

    with patch.object(RankModel, "owned_parameters", renamed):
        return train_on_rank(rank, world_size, config=config, batches=batches)


def by_halves(
    parameters: Parameters, microbatches: Sequence[Microbatch], options: GPTOptions
) -> tuple[list[float], Parameters]:
    """Loss and gradients of a plain GPT with an MLP for each half of the microbatches."""
    whole, loss = count_valid_tokens(microbatches), 0.0
    summed = {name: torch.zeros_like(value) for name, value in parameters.items()}
    for half in range(2):
        own = microbatches[half::2]
        share = count_valid_tokens(own) / whole
        renamed = {
            name: name.replace(HALF.format(half), SHARED)
            for name in parameters
            if HALF.format(1 - half) not in name
        }
        view = {plain: parameters[name] for name, plain in renamed.items()}
        (part,), gradients = losses_and_gradients(view, own, options)
        loss += share * part
        for name, plain in renamed.items():
            summed[name] += share * gradients[plain]
    return [loss], summed


def expected(runs: Sequence[RankRun], *, muon: bool) -> Training:
    """What the plain GPT makes of the initial weights of the runs."""
    start = {n: value.double() for n, value in assemble([own.initial for own in runs]).items()}
    of_mlps = [name for name in start if SHARED.rstrip(".") in name]
    assert len(of_mlps) == 8, "two MLPs of four tensors"
    with patch.object(plain_training, "losses_and_gradients", by_halves):
        return plain_training.train(
            start,
            JOB.batches(),
            JOB.learning_rates(),
            JOB.options,
            JOB.adamw,
            MUON.plain() if muon else None,
        )


@pytest.mark.parametrize(("layout", "muon"), CASES, ids=str)
def test_a_gradient_is_summed_over_its_own_ranks(
    layout: Layout, muon: bool, ranks: RankPool
) -> None:
    config = JOB.config(layout)
    if muon:
        config = replace(config, optimizer=MUON.configured(config.optimizer))
    runs = ranks.run(train_halves, layout.world_size, config=config, batches=JOB.batches())
    check_agreement(runs)
    check_copies(runs)
    wanted = expected(runs, muon=muon)
    assert max(wanted.gradient_norms) > JOB.adamw.clip_grad, "clipping must be at work"
    assert runs[0].losses == pytest.approx(wanted.losses, rel=1e-5)
    assert runs[0].gradient_norms == pytest.approx(wanted.gradient_norms, rel=1e-5)
    gradients = assemble([own.first_gradients for own in runs])
    assert max(errors(gradients, wanted.first_gradients).values()) < 1e-5
    weights = assemble([own.final for own in runs])
    assert max(errors(weights, wanted.parameters).values()) < 1e-4


def test_a_sum_over_all_replicas_would_be_seen(ranks: RankPool) -> None:
    """Else the comparison above would show nothing."""
    config = JOB.config(FOUR)
    runs = ranks.run(train_halves, 4, config=config, batches=JOB.batches(), axis=False)
    wanted = expected(runs, muon=False)
    assert runs[0].gradient_norms != pytest.approx(wanted.gradient_norms, rel=1e-3)


def test_steps_validated_later_change_no_bit(ranks: RankPool) -> None:
    config = JOB.config(Layout(2, "vocab-2", "zb-h1", replicas=2, sharded=True))
    later = replace(config, optimizer=replace(config.optimizer, post_validation=True))
    waited, guessed = (
        ranks.run(train_halves, 4, config=each, batches=JOB.batches()) for each in (config, later)
    )
    assert guessed[0].losses == waited[0].losses
    assert guessed[0].gradient_norms == waited[0].gradient_norms
    weights = [assemble([own.final for own in runs]) for runs in (waited, guessed)]
    assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())
