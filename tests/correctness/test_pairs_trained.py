"""Pairs change when tokens travel, and nothing else: joined and not joined leave the same bits."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from correctness.agreement import errors
from correctness.joined_jobs import config_of, file_of, same, switched
from correctness.rank_runs import (
    Batches,
    RankRun,
    assemble,
    check_agreement,
    train_on_rank,
)
from correctness.short_runs import Layout
from correctness.test_expert_ranks import MODELS, job_of
from correctness.test_experts import PARTS, WHOLE, job
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import Parameters
from schedules.paired import kinds_of_pairs, paired

from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.runtime.stage_passes import StagePasses
from megatron.schedules.passes import Pass

LAYOUTS = [
    ("mixtral", Layout(2, "none", "dualpipe-v", replicas=2, experts=2, dispatcher="alltoall")),
    full(
        "deepseek",
        Layout(2, "vocab-2", "dualpipe-v", replicas=2, experts=2, recomputation=PARTS),
    ),
    full(
        "mixtral",
        Layout(
            2, "vocab-1", "interleaved", replicas=2, experts=2, dispatcher="alltoall",
            recomputation=WHOLE, sharded=True, overlap=True,
        ),
    ),
    ("deepseek", Layout(2, "none", replicas=2, experts=2, dispatcher="alltoall")),
    ("mixtral", Layout(2, "none", "zb-v", replicas=2, experts=2, dispatcher="alltoall", slices=2)),
    full("qwen2", Layout(1, "none", "gpipe", replicas=2, experts=2, dispatcher="alltoall")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout"), LAYOUTS, ids=str)
def test_joined_and_not_joined_leave_the_same_bits(
    name: str, layout: Layout, ranks: RankPool, tmp_path: Path
) -> None:
    job = job_of(MODELS[name])
    file = file_of(layout, job.microbatches // layout.replicas, tmp_path)
    layout = replace(layout, schedule="file", file=file)
    found = [
        ranks.run(
            switched,
            layout.world_size,
            config=config_of(job, layout, overlap=overlap),
            batches=job.batches(),
        )
        for overlap in (False, True)
    ]
    for (plain, none), (joined, turns) in zip(*found, strict=True):
        assert none == 0 < turns
        assert joined.losses == plain.losses
        assert joined.gradient_norms == plain.gradient_norms
        assert same(joined.first_gradients, plain.first_gradients)
        assert same(joined.final, plain.final)
        assert joined.left_in_store == 0


def test_w_gathers_nothing_during_a_pass_if_tensor_ranks_take_no_turns(
    ranks: RankPool, tmp_path: Path
) -> None:
    """A plan of one's own may pair W, with a flag that lets experts alone take turns."""
    own = job("mixtral")
    layout = Layout(1, "none", "zb-h1", tensor=2, sequence=True, experts=2, expert_tensor=1)
    plan = paired(make_run_plan(own.config(layout)).plan, seed=1)
    assert {("F", "W"), ("B", "W")} & set(kinds_of_pairs(plan))
    file = tmp_path / "my.plan"
    file.write_text(plan.to_text())
    layout = replace(layout, schedule="file", file=file)
    (apart, _), (together, turns) = (
        ranks.run(
            switched,
            layout.world_size,
            config=config_of(own, layout, overlap=overlap),
            batches=own.batches(),
        )[0]
        for overlap in (False, True)
    )
    assert turns == 0, "a W begins, and runs in one piece"
    assert together.losses == apart.losses
    assert together.gradient_norms == apart.gradient_norms
    assert same(together.final, apart.final)


def test_the_flag_makes_a_plan_with_pairs() -> None:
    layout = Layout(2, "none", "dualpipe-v", replicas=2, experts=2, dispatcher="alltoall")
    job = job_of(MODELS["mixtral"])
    for overlap in (False, True):
        plan = make_run_plan(config_of(job, layout, overlap=overlap)).plan
        assert bool(plan.pairs) == overlap


UNCLIPPED = job_of(MODELS["deepseek"])
UNCLIPPED = replace(UNCLIPPED, adamw=replace(UNCLIPPED.adamw, clip_grad=0.0))
"""Clipping multiplies by a norm, whose sum is in the order in which gradients are complete."""


def delaying(*, delays: bool) -> RunConfig:
    """A run with pairs under a schedule that does not split the backward by itself."""
    layout = Layout(1, "none", "gpipe", replicas=2, experts=2, dispatcher="alltoall")
    config = config_of(UNCLIPPED, layout, overlap=True)
    pairs = replace(config.parallel.pairs, delay_wgrad_compute=delays)
    config = replace(config, parallel=replace(config.parallel, pairs=pairs))
    plan = make_run_plan(config).plan
    assert plan.pairs
    assert plan.split_backward == delays
    return config


def test_delayed_weight_gradients_leave_the_same_bits(ranks: RankPool) -> None:
    found = [
        ranks.run(switched, 2, config=delaying(delays=delays), batches=UNCLIPPED.batches())
        for delays in (False, True)
    ]
    assert all(turns > 0 for runs in found for _, turns in runs)
    at_once, later = ([run for run, _ in runs] for runs in found)
    check_agreement(later)
    assert later[0].losses == at_once[0].losses
    assert later[0].gradient_norms == pytest.approx(at_once[0].gradient_norms, rel=1e-7)
    assert equal(*(assemble([own.first_gradients for own in runs]) for runs in (later, at_once)))
    assert equal(*(assemble([own.final for own in runs]) for runs in (later, at_once)))


def equal(one: Parameters, other: Parameters) -> bool:
    """Whether two models have the same tensors to the last bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def without_first(self: StagePasses, item: Pass) -> None:
    """W of the first microbatch drops the weight gradients that its B has left."""
    if item.microbatch == 0:
        self.store.take("weights", self.plan.unit(item), item.chunk)
    else:
        weight_gradients(self, item)


weight_gradients = StagePasses.weight_gradients


def train_without_first(
    rank: int, world_size: int, *, config: RunConfig, batches: Batches
) -> RankRun:
    with patch.object(StagePasses, "weight_gradients", without_first):
        return train_on_rank(rank, world_size, config=config, batches=batches)


def test_a_weight_gradient_left_out_is_seen(ranks: RankPool) -> None:
    """Else the comparison above would show nothing: no pass needs what W does."""
    right, wrong = (
        assemble(
            [
                own.first_gradients
                for own in ranks.run(
                    train, 2, config=delaying(delays=True), batches=UNCLIPPED.batches()[:1]
                )
            ]
        )
        for train in (train_on_rank, train_without_first)
    )
    assert max(errors(wrong, right).values()) > 0.1
