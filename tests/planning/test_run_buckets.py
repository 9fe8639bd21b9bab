"""The buckets of a run that is not started are those that its ranks make."""

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from correctness.rank_runs import CPU
from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions

from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.parallel.groups import make_groups
from megatron.planning.run_buckets import run_buckets
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.schedules.lower import Program
from megatron.schedules.needs import REPLICA_KINDS
from megatron.schedules.settings import ScheduleSettings
from megatron.training.setup import build_train_state

if TYPE_CHECKING:
    from harness.rank_pool import RankPool

TIMEOUT = timedelta(seconds=60)
JOB = Job(GPTOptions(num_layers=4, vocab_size=64), micro_batch_size=1, microbatches=8, iterations=1)


def started(rank: int, world_size: int, *, config: RunConfig) -> tuple[int, Program, int, int]:
    """Return the pipeline rank, its program, and its parameters without and with padding."""
    groups = make_groups(config.parallel.grid, CPU, TIMEOUT)
    state = build_train_state(config, groups)
    program = state.pipeline.train_program
    state.pipeline.close()
    held = sum(entry.parameter.numel() for entry in state.parameters)
    padded = sum(bucket.layout.size for bucket in state.buckets)
    return groups.pipeline.rank, program, held, padded


@pytest.mark.parametrize(
    ("treatment", "schedule", "tied"),
    [("none", "1f1b", True), ("vocab-2", "zb-v", False), ("vocab-1", "zb-h1", True)],
)
def test_they_are_those_of_a_started_run(
    treatment: str, schedule: str, tied: bool, ranks: "RankPool"
) -> None:
    layout = Layout(2, treatment, schedule, replicas=2)
    config = JOB.config(layout)
    found = run_buckets(config, make_run_plan(config))
    for rank, program, held, padded in ranks.run(started, layout.world_size, config=config):
        own = found[rank]
        assert (own.parameters, own.padded) == (held, padded)
        assert own.padded >= own.parameters
        shares = {c.microbatch: s for c, s in program.shares.items() if c[::2] == ("RG", rank)}
        assert [bucket.share for bucket in own.buckets] == [shares[i] for i in sorted(shares)]


def test_weights_that_are_gathered_in_8_bits_have_half_a_share(ranks: "RankPool") -> None:
    layout = Layout(2, "vocab-2", replicas=2, sharded=True, overlap=True)
    config = JOB.config(layout, torch.bfloat16)
    replicas = replace(config.parallel.replicas, gathers_eight_bits=True)
    config = replace(
        config,
        parallel=replace(config.parallel, replicas=replicas),
        train=replace(config.train, eight_bits=EightBitSettings("hybrid", "blockwise")),
    )
    found = run_buckets(config, make_run_plan(config))
    for rank, program, held, padded in ranks.run(started, layout.world_size, config=config):
        own = found[rank]
        assert (own.parameters, own.padded) == (held, padded)
        for kind in REPLICA_KINDS:
            shares = {c.microbatch: s for c, s in program.shares.items() if c[::2] == (kind, rank)}
            assert len(shares) == len(own.buckets)
            assert [one.share_of(kind) for one in own.buckets] == [
                shares[i] for i in range(len(shares))
            ]
        assert 0 < own.narrow < own.padded
        assert own.narrow_own == own.narrow / 2
        assert own.gathered == own.passed_on - own.narrow / 4


def test_a_model_that_fits_no_machine_has_them_too() -> None:
    job = replace(JOB, microbatches=64)
    config = job.config(Layout(2, "vocab-2", "1f1b", replicas=64), torch.bfloat16)
    wide: dict[str, Any] = {
        "hidden_size": 1 << 18,
        "ffn_hidden_size": 1 << 20,
        "kv_channels": 1 << 16,
    }
    config = replace(config, model=config.model.replaced(**wide))
    found = run_buckets(config, make_run_plan(config))
    assert sum(own.parameters for own in found) > 1 << 41
    for own in found:
        assert sum(bucket.share for bucket in own.buckets) == pytest.approx(1)
        assert own.padded < 1.03 * own.parameters


def test_runs_that_differ_have_buckets_of_their_own() -> None:
    """The buckets of equal ranks are made once; each run here differs by one setting."""
    config = JOB.config(Layout(2, "none", "1f1b", replicas=2, sharded=True), torch.bfloat16)
    plan = make_run_plan(config)
    replicas = config.parallel.replicas
    first = run_buckets(config, plan)
    for own in (
        replace(
            config, parallel=replace(config.parallel, replicas=replace(replicas, ddp_num_buckets=9))
        ),
        replace(config, parallel=replace(config.parallel, replicas=replace(replicas, size=4))),
        replace(config, optimizer=replace(config.optimizer, optimizer="muon")),
        replace(config, model=config.model.replaced(ffn_hidden_size=48)),
    ):
        assert run_buckets(own, plan) != first
    assert [*map(id, run_buckets(config, plan))] == [*map(id, first)]
    split = replace(config, parallel=replace(config.parallel, schedule=ScheduleSettings("zb-h1")))
    assert {kind for own in first[0].buckets for kind, _ in own.after} == {"B"}
    with_weights = run_buckets(split, make_run_plan(split))
    assert {kind for own in with_weights[0].buckets for kind, _ in own.after} == {"B", "W"}


def test_parts_of_all_replicas_are_the_parameters() -> None:
    config = JOB.config(Layout(2, "vocab-2", "1f1b", replicas=4, sharded=True), torch.bfloat16)
    for own in run_buckets(config, make_run_plan(config)):
        assert sum(size for parts in own.parts for _, size in parts) == own.parameters
