"""Placeholder passes leave what real ones leave: other ranks go on computing beside them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from correctness.rank_runs import CPU, connected
from correctness.short_runs import Job, Layout
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions

from megatron.layers.recompute import Recomputation
from megatron.run.precision import PrecisionSettings
from megatron.run.run_config import RunConfig
from megatron.runtime.batch import HostMicrobatch, to_device
from megatron.training.setup import build_train_state

TREATMENTS = ("none", "vocab-2", "vocab-1", "naive", "interlaced")
CASES = [
    *(("1f1b", treatment) for treatment in TREATMENTS),
    ("gpipe", "naive"),
    ("interleaved", "vocab-1"),
    ("zb-h1", "none"),
    ("zb-v", "vocab-2"),
    ("v-half", "interlaced"),
]


def train_placeholders_on_one_rank(
    rank: int,
    world_size: int,
    *,
    config: RunConfig,
    batch: Sequence[HostMicrobatch],
    placeholder: int,
) -> tuple[bool, int]:
    """Abandon an iteration on one rank only; return whether this one went on, and what is left."""
    state = build_train_state(config, connected(config))
    pipeline = state.pipeline
    loss = pipeline.train(to_device(batch, CPU), 0, gate=lambda: rank != placeholder)
    pipeline.close()
    return loss is not None, len(pipeline.store)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("placeholder", range(2))
@pytest.mark.parametrize(("schedule", "treatment"), CASES)
def test_placeholder_passes_get_on_with_real_ones(
    schedule: str, treatment: str, placeholder: int, ranks: RankPool
) -> None:
    """All that they exchange has the same shapes and dtypes: a gloo of other sizes would raise."""
    job = Job(
        GPTOptions(num_layers=4, vocab_size=61, tie_embeddings=False), microbatches=4, iterations=1
    )
    again = treatment in ("none", "vocab-2")
    layout = Layout(2, treatment, schedule)
    if again:
        layout = replace(layout, recomputation=Recomputation(group=1), recompute_ahead=2)
    check_one_placeholder(job, job.config(layout), placeholder, ranks)


def check_one_placeholder(job: Job, config: RunConfig, placeholder: int, ranks: RankPool) -> None:
    size = config.parallel.pipeline.size
    done = ranks.run(
        train_placeholders_on_one_rank,
        size,
        config=config,
        batch=job.batches()[0],
        placeholder=placeholder,
    )
    assert done == [(rank != placeholder, 0) for rank in range(size)]


@pytest.mark.parametrize("placeholder", [1, 2])
@pytest.mark.parametrize("treatment", ["vocab-1", "vocab-2"])
def test_placeholder_passes_send_what_further_tokens_are_predicted_from(
    treatment: str, placeholder: int, ranks: RankPool
) -> None:
    """Rank 1 predicts them, and rank 2 has the loss; the stream between layers is in fp32."""
    options = GPTOptions(
        num_layers=4, vocab_size=61, position_embedding_type="rope", mtp_num_layers=2
    )
    job = Job(options, microbatches=4, iterations=1)
    config = job.config(Layout(3, treatment, stages="Ett|ttmm|L"), torch.bfloat16)
    wide = PrecisionSettings(bf16=True, fp32_residual_connection=True)
    config = replace(config, train=replace(config.train, precision=wide))
    check_one_placeholder(job, config, placeholder, ranks)
