"""Hollow passes leave what real ones leave: ranks that compute go on beside one that does not."""

import pytest
from correctness.job import Job, Layout
from correctness.rank_runs import CPU, make_pipeline_groups
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions

from megatron.runtime.batch import to_device
from megatron.training.config import RunConfig
from megatron.training.setup import build_trainer

TREATMENTS = ("none", "vocab-2", "vocab-1", "naive", "interlaced")
CASES = [
    *(("1f1b", treatment) for treatment in TREATMENTS),
    ("gpipe", "naive"),
    ("interleaved", "vocab-1"),
    ("zb-h1", "none"),
    ("zb-v", "vocab-2"),
    ("v-half", "interlaced"),
]


def train_hollow_on_one_rank(
    rank: int, world_size: int, *, config: RunConfig, batch: list, hollow: int
) -> tuple[bool, int]:
    """Abandon an iteration on one rank only; return whether this one went on, and what is left."""
    trainer = build_trainer(config, make_pipeline_groups())
    pipeline = trainer.pipeline
    loss = pipeline.train(to_device(batch, CPU), 0, gate=lambda: rank != hollow)
    pipeline.close()
    return loss is not None, len(pipeline.store)


@pytest.mark.parametrize("hollow", range(2))
@pytest.mark.parametrize(("schedule", "treatment"), CASES)
def test_hollow_passes_get_on_with_real_ones(
    schedule: str, treatment: str, hollow: int, ranks: RankPool
) -> None:
    """All that they exchange has the same shapes and dtypes: a gloo of other sizes would raise."""
    job = Job(
        GPTOptions(num_layers=4, vocab_size=61, tie_embeddings=False), microbatches=4, iterations=1
    )
    config = job.config(Layout(2, treatment, schedule))
    done = ranks.run(
        train_hollow_on_one_rank, 2, config=config, batch=job.batches()[0], hollow=hollow
    )
    assert done == [(rank != hollow, 0) for rank in range(2)]
