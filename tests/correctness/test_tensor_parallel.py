"""Tensor and sequence parallelism beside all other axes train what one process trains."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from correctness.rank_runs import assemble, train_on_rank
from correctness.short_runs import EIGHT_LAYER_GPT, EIGHT_LAYER_LLAMA, Job, Layout
from correctness.test_replica_cover import errors, joined
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions
from reference.plain_training import Training

GPT = replace(EIGHT_LAYER_GPT, num_layers=4, label_smoothing=0.1)
UNTIED = replace(GPT, tie_embeddings=False)
LLAMA = replace(EIGHT_LAYER_LLAMA, num_layers=4, z_loss_coeff=0.01)


def job_of(options: GPTOptions, samples: int = 1) -> Job:
    """Eight microbatches, of which every second replica has none that counts."""
    return Job(
        options,
        samples,
        microbatches=8,
        masked_out=(1, 3, 5, 7),
        iterations=4,
        warmup=2,
        sequence=12,
    )


CASES = [
    (Layout(1, "none", tensor=2), GPT, 1),
    (Layout(1, "none", tensor=2, sequence=True), GPT, 2),
    (Layout(1, "vocab-2", tensor=2, sequence=True), LLAMA, 2),
    (Layout(2, "vocab-2", tensor=2), GPT, 1),
    (Layout(2, "vocab-2", "zb-h1", tensor=2, sequence=True), GPT, 2),
    (Layout(2, "vocab-1", "interleaved", tensor=2, sequence=True), LLAMA, 2),
    (Layout(2, "naive", tensor=2, sequence=True), UNTIED, 2),
    (Layout(2, "interlaced", tensor=2), LLAMA, 2),
    (Layout(2, "none", "zb-v", tensor=2, sequence=True), GPT, 1),
    (Layout(2, "none", tensor=2, sequence=True), GPT, 2),
    (Layout(2, "redis", tensor=2), UNTIED, 1),
    (Layout(1, "vocab-2", tensor=4, sequence=True), GPT, 1),
    (Layout(1, "none", tensor=4), GPT, 1),
    (Layout(1, "none", tensor=2, replicas=2, sequence=True, sharded=True, overlap=True), LLAMA, 1),
]


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> Callable[[GPTOptions, int], Training]:
    """What one process makes of a job, in plain PyTorch and float64."""
    done: dict[tuple[GPTOptions, int], Training] = {}

    def of(options: GPTOptions, samples: int) -> Training:
        key = options, samples
        if key not in done:
            job = job_of(options, samples)
            config = job.config(Layout(1, "none"))
            [own] = ranks.run(train_on_rank, 1, config=config, batches=job.batches()[:1])
            initial = assemble([own.initial])
            done[key] = job.reference({name: value.double() for name, value in initial.items()})
        return done[key]

    return of


def name_of(value: object) -> str:
    return str(value) if isinstance(value, Layout) else ""


@pytest.mark.parametrize(("layout", "options", "samples"), CASES, ids=name_of)
def test_layouts_train_what_one_process_trains(
    layout: Layout,
    options: GPTOptions,
    samples: int,
    ranks: RankPool,
    alone: Callable[[GPTOptions, int], Training],
) -> None:
    job, expected = job_of(options, samples), alone(options, samples)
    by_rank = ranks.run(
        train_on_rank,
        layout.world_size,
        config=job.config(layout),
        batches=job.batches(),
        evaluation_batches=job.batches(seed=1),
        evaluate_after=(3,),
    )
    assert all(own.losses == by_rank[0].losses for own in by_rank)
    assert all(own.gradient_norms == by_rank[0].gradient_norms for own in by_rank)
    assert [own.left_in_store for own in by_rank] == [0] * layout.world_size
    assert by_rank[0].losses == pytest.approx(expected.losses, rel=1e-5)
    assert by_rank[0].gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-5)
    gradients = assemble([own.first_gradients for own in by_rank])
    assert max(errors(gradients, expected.first_gradients).values()) < 1e-5
    final = assemble([own.final for own in by_rank])  # all copies are equal, to the last bit
    [whole] = errors({"": joined(final)}, {"": joined(expected.parameters)}).values()
    assert whole < 1e-5
