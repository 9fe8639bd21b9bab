"""Runs whose batches grow, against the plain GPT on batches of the same sizes."""

import io
import re
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from correctness.rank_runs import (
    Pieces,
    assemble,
    parameter_values,
    pieces,
)
from correctness.short_runs import Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions, Parameters
from reference.plain_loss import loss_and_gradients
from reference.plain_training import Training
from reference.plain_training import train as train_plainly

from megatron.checkpoint.settings import CheckpointSettings
from megatron.data.batch_sizes import Rampup
from megatron.data.microbatch import Microbatch, MicrobatchLoader
from megatron.optimizer.lr_schedule import learning_rate
from megatron.parallel.groups import make_groups
from megatron.planning.planned_run import RunPlan
from megatron.run.run_config import RunConfig
from megatron.training.growing_batches import GrowingBatches
from megatron.training.loop import train
from megatron.training.open_data import Data
from megatron.training.setup import build_train_state

JOB = Job(GPTOptions(num_layers=4, vocab_size=61))
LENGTH = 40
SIZES = [2, 2, 2, 4, 4, 6, 6, 6, 6]
"""Of the batches that grow from 2 by 2 over 12 samples, in a run of ``LENGTH`` samples."""


class Samples:
    """Samples that are functions of their number.

    Args:
        seed: of them all.
    """

    seq_length = JOB.sequence
    masked_token: int | None = None

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __len__(self) -> int:
        return LENGTH

    def read(self, index: int, out: Any) -> None:
        """Write a sample."""
        generator = np.random.default_rng((self._seed, index))
        out[:] = generator.integers(0, JOB.options.vocab_size, len(out))


@dataclass
class Ended:
    """What a rank held at the start and at the end, and what it printed."""

    initial: Pieces
    final: Pieces
    said: str


def loader(seed: int, size: int, replica: int = 0, replicas: int = 1) -> MicrobatchLoader:
    return MicrobatchLoader(Samples(seed), 1, size // replicas, replica=(replica, replicas))


def run_on_rank(rank: int, world_size: int, *, config: RunConfig) -> Ended:
    groups = make_groups(config.parallel.grid, torch.device("cpu"), timedelta(seconds=60))
    state = build_train_state(config, groups)
    initial = pieces(state, parameter_values)
    share = config.train.global_batch_size, groups.data.rank, groups.data.size
    with redirect_stdout(io.StringIO()) as out:
        train(config, state, Data(loader(0, *share), {"validation": loader(1, *share)}))
    return Ended(initial, pieces(state, parameter_values), out.getvalue())


def configured(layout: Layout, size: int = 6, **train_options: Any) -> RunConfig:
    config = JOB.config(layout)
    train_config = replace(
        config.train, global_batch_size=size, train_samples=LENGTH, eval_interval=3, eval_iters=1
    )
    train_config = replace(train_config, **train_options)
    iterations = train_config.batches.iterations(LENGTH)
    return replace(
        config,
        train=replace(train_config, train_iters=iterations),
        optimizer=replace(config.optimizer, lr_decay_samples=LENGTH, lr_warmup_samples=10),
        log=replace(config.log, peak_tflops=1.0),
    )


def growing(layout: Layout, **train_options: Any) -> RunConfig:
    return configured(layout, rampup=Rampup(2, 2, 12), **train_options)


def batches(sizes: Sequence[int]) -> list[list[Microbatch]]:
    """The training batches of these sizes, in microbatches of one sample."""
    first = [0, *accumulate(sizes)]
    return [loader(0, size).global_batch(begin) for begin, size in zip(first, sizes, strict=False)]


def reference(start: Parameters, sizes: Sequence[int], config: RunConfig) -> Training:
    first = [0, *accumulate(sizes)][: len(sizes)]
    rates = [learning_rate(config.optimizer, consumed) for consumed in first]
    in_float64 = {name: value.double() for name, value in start.items()}
    return train_plainly(in_float64, batches(sizes), rates, JOB.options, JOB.adamw)


def printed(said: str, label: str) -> list[float]:
    return [float(found) for found in re.findall(rf"\| {label}: +(\S+) \|", said)]


@pytest.mark.parametrize(
    "layout",
    [
        full(Layout(1, "none")),
        Layout(2, "vocab-2", "zb-h1"),
        full(Layout(2, "none", "interleaved")),
        full(Layout(1, "none", replicas=2, overlap=True)),
        full(Layout(2, "vocab-2", "zb-h1", replicas=2, overlap=True, sharded=True)),
    ],
    ids=str,
)
def test_batches_that_grow_train_as_the_plain_gpt_does(layout: Layout, ranks: RankPool) -> None:
    config = growing(layout)
    by_rank: list[Ended] = ranks.run(run_on_rank, layout.world_size, config=config)
    said = by_rank[0].said
    expected = reference(assemble([own.initial for own in by_rank]), SIZES, config)
    assert printed(said, "global batch size") == SIZES
    assert printed(said, "consumed samples") == list(accumulate(SIZES))
    assert printed(said, "lm loss") == pytest.approx(expected.losses, rel=1e-5)
    final = assemble([own.final for own in by_rank])
    for name, value in expected.parameters.items():
        torch.testing.assert_close(final[name].double(), value, rtol=0, atol=2e-3, msg=name)


def test_evaluations_have_batches_of_the_last_size(ranks: RankPool) -> None:
    config = growing(Layout(2, "vocab-2"))
    by_rank: list[Ended] = ranks.run(run_on_rank, 2, config=config)
    start = assemble([own.initial for own in by_rank])
    expected = []
    for number, trained in enumerate((3, 6, 9)):
        weights = reference(start, SIZES[:trained], config).parameters
        batch = loader(1, 6).global_batch(6 * number)
        expected.append(loss_and_gradients(weights, batch, JOB.options)[0])
    assert printed(by_rank[0].said, "lm loss value") == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("post_validation", [full(False), True])
def test_a_run_resumed_while_batches_grow_is_the_unbroken_one(
    post_validation: bool, ranks: RankPool, tmp_path: Path
) -> None:
    config = growing(Layout(2, "vocab-2", "zb-h1"))
    optimizer = replace(config.optimizer, post_validation=post_validation)
    config = replace(config, optimizer=optimizer)
    half = replace(
        config,
        train=replace(config.train, exit_interval=4),
        checkpoint=CheckpointSettings(save=tmp_path),
    )
    rest = replace(config, checkpoint=CheckpointSettings(load=tmp_path))
    unbroken, first, second = (
        ranks.run(run_on_rank, 2, config=part) for part in (config, half, rest)
    )
    said = first[0].said + second[0].said
    assert printed(said, "global batch size") == SIZES
    assert printed(said, "lm loss") == printed(unbroken[0].said, "lm loss")
    assert printed(said, "lm loss value") == printed(unbroken[0].said, "lm loss value")
    for own, expected in zip(second, unbroken, strict=True):
        for name, (_, parts) in own.final.items():
            for (_, value), (_, same) in zip(parts, expected.final[name][1], strict=True):
                assert torch.equal(value, same), name


def test_a_run_in_samples_may_go_on_with_other_batches(ranks: RankPool, tmp_path: Path) -> None:
    """Three batches of 2, then batches of 4, and more evaluations than batches of 4 alone have."""
    layout = Layout(2, "vocab-2")
    first = configured(layout, size=2, exit_interval=3)
    first = replace(first, checkpoint=CheckpointSettings(save=tmp_path))
    then = replace(configured(layout, size=4), checkpoint=CheckpointSettings(load=tmp_path))
    begun: list[Ended] = ranks.run(run_on_rank, 2, config=first)
    ended: list[Ended] = ranks.run(run_on_rank, 2, config=then)
    sizes = [2] * 3 + [4] * 8
    expected = reference(assemble([own.initial for own in begun]), sizes, then)
    said = begun[0].said + ended[0].said
    assert printed(said, "global batch size") == sizes
    assert printed(said, "consumed samples") == list(accumulate(sizes))
    assert printed(said, "lm loss") == pytest.approx(expected.losses, rel=1e-5)
    assert len(printed(said, "lm loss value")) == len(sizes) // 3
    assert " 4/      11 |" in ended[0].said


def plan_and_tell(rank: int, world_size: int, *, config: RunConfig) -> list[tuple[str, bool]]:
    """Train; return where the rank said to be while it planned, and whether that may last."""
    found: list[tuple[str, bool]] = []
    plan = GrowingBatches._plan

    def told(batches: GrowingBatches, size: int) -> RunPlan:
        position = batches._state.pipeline.position
        found.append((position.phase, position.may_last))
        return plan(batches, size)

    with patch.object(GrowingBatches, "_plan", told):
        run_on_rank(rank, world_size, config=config)
    return found


def test_a_search_for_the_next_plan_is_not_taken_for_a_hang(ranks: RankPool) -> None:
    """It may last as long as the one before the run."""
    [told] = ranks.run(plan_and_tell, 1, config=growing(Layout(1, "none")))
    assert told == [("the plan for batches of another size", True)] * 2
