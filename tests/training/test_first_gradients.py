"""A sum of gradients begins with its first one: what was in its memory before never counts."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from correctness.rank_runs import Batches, RankRun, train_on_rank
from correctness.short_runs import Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions

from megatron.layers.recompute import Recomputation
from megatron.optimizer.bucket import Bucket
from megatron.run.run_config import RunConfig


def zeroes(bucket: Bucket) -> None:
    """Begin sums as those do who know nothing of a first gradient."""
    bucket.gradients.zero_()


forgets: Callable[[Bucket], None] = Bucket.forget_gradients


def forgets_and_spoils(bucket: Bucket) -> None:
    """Begin sums over memory that must not be read."""
    forgets(bucket)
    bucket._gradients.fill_(torch.nan)


def on_rank(
    rank: int,
    world_size: int,
    *,
    config: RunConfig,
    batches: Batches,
    begin: Callable[[Bucket], None],
) -> RankRun:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "forget_gradients", begin)
        return train_on_rank(
            rank,
            world_size,
            config=config,
            batches=batches,
            evaluation_batches=batches[:1],
            evaluate_after=[0],
        )


BF16, FP32 = torch.bfloat16, torch.float32
REPLICAS = Layout(2, "vocab-2", replicas=2, overlap=True, sharded=True, bucket_size=3000)
AHEAD = Layout(2, "vocab-1", "zb-h1", recomputation=Recomputation(group=1), recompute_ahead=1)


@pytest.mark.parametrize(
    ("layout", "tied", "dtype", "validates"),
    [
        (Layout(2, "vocab-2"), True, BF16, False),
        (Layout(2, "vocab-1", "zb-v"), True, FP32, True),
        (REPLICAS, False, BF16, False),
        full(Layout(2, "vocab-2", "zb-h1"), False, BF16, True),
        full(Layout(2, "none"), True, BF16, False),
        full(Layout(2, "none"), True, FP32, True),
        full(Layout(2, "naive", vocab_recompute=True), False, FP32, False),
        full(REPLICAS, True, FP32, False),
        full(Layout(2, "vocab-2", replicas=2), False, FP32, False),
        full(Layout(2, "interlaced", tensor=2, sequence=True), True, BF16, False),
        full(AHEAD, True, BF16, False),
    ],
    ids=str,
)
def test_memory_that_is_not_zeroed_never_counts(
    layout: Layout, tied: bool, dtype: torch.dtype, validates: bool, ranks: RankPool
) -> None:
    job = Job(GPTOptions(num_layers=4, tie_embeddings=tied), microbatches=4, iterations=2)
    config, batches = job.config(layout, dtype), job.batches()
    config = replace(
        config,
        optimizer=replace(config.optimizer, post_validation=validates),
        train=replace(config.train, eval_iters=1),
    )
    zeroed, spoiled = (
        ranks.run(on_rank, layout.world_size, config=config, batches=batches, begin=begin)
        for begin in (zeroes, forgets_and_spoils)
    )
    for one, other in zip(zeroed, spoiled, strict=True):
        assert len(one.losses) == job.iterations
        assert one.losses == other.losses
        assert one.gradient_norms == other.gradient_norms
        assert one.evaluations == other.evaluations != []
        assert one.after_steps == other.after_steps
