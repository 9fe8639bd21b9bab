"""Runs whose replicas gather weights in 8 bits: those of runs that gather 16 bits, bit by bit."""

import math
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import pytest
import torch
from correctness import rank_runs
from correctness.eight_bit_runs import LLAMA, config_of
from correctness.rank_runs import Batches, RankRun, check_agreement, connected, train_on_rank
from correctness.short_runs import Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool

from megatron.layers.eight_bit_settings import EightBitSettings
from megatron.layers.eight_bits import ByMultiplier
from megatron.parallel import collectives
from megatron.parallel.groups import ConnectedAxis
from megatron.run.run_config import RunConfig
from megatron.runtime.pipeline import PipelineRank
from megatron.training.post_validated_step import make_train_step
from megatron.training.setup import build_train_state

GPT = replace(LLAMA, num_layers=2, ffn_hidden_size=208, kv_channels=48)
"""Its matrices have up to 416 rows and 208 columns: blocks of 128 x 128 that shards cut."""
MIXTURE = replace(GPT, num_experts=4, moe_ffn_hidden_size=144, moe_router_topk=2)
MODELS: Final = {"gpt": GPT, "deep": replace(GPT, num_layers=4), "mixture": MIXTURE}
JOB = Job(GPT, micro_batch_size=2, microbatches=4, masked_out=(1,), iterations=4, sequence=16)
BLOCKWISE = EightBitSettings("e4m3", "blockwise")
TENSORWISE = EightBitSettings("hybrid", "tensorwise")
DELAYED = EightBitSettings(
    "hybrid", "delayed", fp8_amax_history_len=2, fp8_amax_compute_algo="max", fp8_margin=1
)
WIDE = EightBitSettings("hybrid", "tensorwise", wide_weight_gradients=True)
D2 = Layout(1, "none", replicas=2, sharded=True)
D2_P2 = Layout(2, "vocab-2", "zb-h1", replicas=2, sharded=True, overlap=True)


def telling_config_of(
    layout: Layout, eight_bits: EightBitSettings, job: Job, dtype: torch.dtype
) -> RunConfig:
    """Return the configuration of a run in 8 bits that tells the norm of its parameters."""
    config = config_of(job, layout, eight_bits, dtype)
    return replace(config, log=replace(config.log, log_params_norm=True))


def gathering_eight_bits(config: RunConfig) -> RunConfig:
    replicas = replace(config.parallel.replicas, gathers_eight_bits=True)
    return replace(config, parallel=replace(config.parallel, replicas=replicas))


class Gathered(NamedTuple):
    """Bytes of all buckets that a rank has gathered: those in 8 bits, and all others."""

    narrow: int
    wide: int


def train_and_count(
    rank: int, world_size: int, *, config: RunConfig, batches: Batches
) -> tuple[RankRun, Gathered]:
    """Train, and evaluate after the second iteration."""
    gathered: list[torch.Tensor] = []
    gather = collectives.gather_parts

    def counting(tensor: torch.Tensor, axis: ConnectedAxis, sizes: Any = None) -> None:
        if axis.size > 1:
            gathered.append(tensor)
        gather(tensor, axis, sizes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "gather_parts", counting)
        run = train_on_rank(
            rank,
            world_size,
            config=config,
            batches=batches,
            evaluation_batches=batches[:2],
            evaluate_after=[1],
        )
    narrow = sum(tensor.nbytes for tensor in gathered if tensor.dtype == torch.uint8)
    return run, Gathered(narrow, sum(tensor.nbytes for tensor in gathered) - narrow)


def trained(ranks: RankPool, config: RunConfig, job: Job) -> tuple[RankRun, Gathered]:
    found: list[tuple[RankRun, Gathered]] = ranks.run(
        train_and_count, config.parallel.grid.world_size, config=config, batches=job.batches()
    )
    check_agreement([run for run, _ in found])
    return found[0]


def check_that_values_are_those_without(ranks: RankPool, config: RunConfig, job: Job) -> None:
    """Losses to the last bit, and the bytes that the replicas gather."""
    wanted, usual = trained(ranks, config, job)
    found, gathered = trained(ranks, gathering_eight_bits(config), job)
    assert found.losses == wanted.losses
    assert found.evaluations == wanted.evaluations
    # Shards have other bounds, so that squares add up in another order.
    assert found.gradient_norms == pytest.approx(wanted.gradient_norms, rel=1e-7)
    assert found.params_norms == pytest.approx(wanted.params_norms, rel=1e-7)
    size = config.train.dtype.itemsize
    assert usual.narrow == 0
    assert gathered.narrow > 0.45 * usual.wide / size
    assert size * gathered.narrow + gathered.wide == pytest.approx(usual.wide, rel=0.02)


@pytest.mark.parametrize(
    ("layout", "eight_bits", "model", "dtype"),
    [
        (D2, BLOCKWISE, "gpt", torch.bfloat16),
        (replace(D2, overlap=True), TENSORWISE, "gpt", torch.bfloat16),
        (D2_P2, BLOCKWISE, "gpt", torch.bfloat16),
        (D2, DELAYED, "gpt", torch.bfloat16),
        full(D2_P2, DELAYED, "gpt", torch.bfloat16),
        (replace(D2_P2, experts=2, dispatcher="alltoall"), DELAYED, "mixture", torch.bfloat16),
        full(replace(D2_P2, schedule="1f1b"), WIDE, "gpt", torch.bfloat16),
        full(replace(D2_P2, schedule="zb-v"), BLOCKWISE, "deep", torch.bfloat16),
        full(replace(D2, experts=2), BLOCKWISE, "mixture", torch.bfloat16),
        full(Layout(1, "none", context=2, sharded=True), BLOCKWISE, "gpt", torch.float32),
        full(replace(D2, tensor=2, sequence=True), BLOCKWISE, "gpt", torch.bfloat16),
        full(
            replace(D2, replicas=4),
            replace(BLOCKWISE, first_last_layers_bf16=True, num_layers_at_start_in_bf16=0),
            "gpt",
            torch.bfloat16,
        ),
        (replace(D2, overlap=True), BLOCKWISE, "mixture", torch.bfloat16),
        (replace(D2_P2, experts=2, dispatcher="alltoall"), TENSORWISE, "mixture", torch.bfloat16),
    ],
    ids=str,
)
def test_values_are_those_without(
    layout: Layout, eight_bits: EightBitSettings, model: str, dtype: torch.dtype, ranks: RankPool
) -> None:
    job = replace(JOB, options=MODELS[model])
    check_that_values_are_those_without(
        ranks, telling_config_of(layout, eight_bits, job, dtype), job
    )


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [(D2, {"optimizer": "muon"}), full(replace(D2_P2, overlap=False), {"post_validation": True})],
    ids=str,
)
def test_every_optimizer_rounds_alike(
    layout: Layout, optimizer: dict[str, Any], ranks: RankPool
) -> None:
    """Muon's shards are whole matrices; a step that is undone is rounded again."""
    config = telling_config_of(layout, BLOCKWISE, JOB, torch.bfloat16)
    config = replace(
        config,
        optimizer=replace(config.optimizer, **optimizer),
        log=replace(config.log, log_params_norm=False),
    )
    wanted, _ = trained(ranks, config, JOB)
    found, gathered = trained(ranks, gathering_eight_bits(config), JOB)
    assert found.losses == wanted.losses
    assert found.evaluations == wanted.evaluations
    assert gathered.narrow > gathered.wide


def train_past_infinity(
    rank: int, world_size: int, *, config: RunConfig, batches: Batches
) -> RankRun:
    """Train; the gradients of the third iteration are not finite, and no step is taken."""
    train = PipelineRank.train

    def spoiled(self: PipelineRank, batch: Any, iteration: int, *further: Any) -> Any:
        loss = train(self, batch, iteration, *further)
        if iteration == 2:
            for bucket in self._replication.buckets:
                bucket.gradients[:1] = torch.inf
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelineRank, "train", spoiled)
        patch.setattr(
            rank_runs, "make_train_step", partial(make_train_step, ends_if_not_finite=False)
        )
        return train_on_rank(rank, world_size, config=config, batches=batches)


def test_weights_are_rounded_anew_although_no_step_was_taken(ranks: RankPool) -> None:
    """The second iteration's step has changed the largest weights, and so the fourth's scales."""
    eight_bits = replace(DELAYED, fp8_amax_history_len=1, fp8_amax_compute_algo="most_recent")
    config = telling_config_of(D2, eight_bits, JOB, torch.float32)  # bf16 rounds small steps off
    both = []
    for own in (config, gathering_eight_bits(config)):
        run, *_ = ranks.run(train_past_infinity, 2, config=own, batches=JOB.batches())
        both.append(run)
    wanted, found = both
    assert not math.isfinite(wanted.gradient_norms[2])
    assert len(wanted.losses) == JOB.iterations
    assert found.losses == wanted.losses


def places_on_rank(rank: int, world_size: int, *, config: RunConfig) -> list[int]:
    """Addresses of the bits and of the worths that layers were given."""
    found: list[int] = []
    give = ByMultiplier.give

    def noting(self: Any, bits_rk: torch.Tensor, worth_gbc: torch.Tensor) -> None:
        found.extend((bits_rk.data_ptr(), worth_gbc.data_ptr()))
        give(self, bits_rk, worth_gbc)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ByMultiplier, "give", noting)
        build_train_state(config, connected(config)).close()
    return found


@pytest.mark.parametrize("eight_bits", [BLOCKWISE, TENSORWISE], ids=["blockwise", "tensorwise"])
def test_bits_and_worths_are_where_cublas_reads_them(
    eight_bits: EightBitSettings, ranks: RankPool
) -> None:
    config = gathering_eight_bits(telling_config_of(D2, eight_bits, JOB, torch.bfloat16))
    for places in ranks.run(places_on_rank, 2, config=config):
        assert len(places) == 2 * 4 * GPT.num_layers
        assert all(place % 16 == 0 for place in places)


def held_on_rank(rank: int, world_size: int, *, config: RunConfig) -> tuple[int, int, int]:
    """Bytes that hold this rank's matrices in bf16; elements of its shards, and of the matrices."""
    state = build_train_state(config, connected(config))
    weights = state.pipeline.model.gathered_weights()
    matrices = [own for own in state.parameters if id(own.parameter) in weights]
    held = {own.parameter.untyped_storage().data_ptr(): own.parameter for own in matrices}
    shards = [part.weight for part in state.updated if id(part.owned.parameter) in weights]
    own = {weight.untyped_storage().data_ptr(): weight for weight in shards}
    nbytes = sum(each.untyped_storage().nbytes() for each in (*held.values(), *own.values()))
    elements = sum(weight.numel() for weight in shards)
    state.close()
    return nbytes, elements, sum(own.parameter.numel() for own in matrices)


def test_only_a_shard_of_the_matrices_is_held_in_16_bits(ranks: RankPool) -> None:
    layout = replace(D2, replicas=4)
    config = telling_config_of(layout, BLOCKWISE, JOB, torch.bfloat16)
    usual = ranks.run(held_on_rank, 4, config=config)
    found = ranks.run(held_on_rank, 4, config=gathering_eight_bits(config))
    for nbytes, _, elements in usual:
        assert nbytes >= 2 * elements
    for nbytes, shard, elements in found:
        assert shard == pytest.approx(elements / 4, rel=0.02)
        assert nbytes == pytest.approx(2 * shard, rel=0.02)
