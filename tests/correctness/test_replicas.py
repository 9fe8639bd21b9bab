"""Replicas of a pipeline train what one process trains on the whole global batch."""

from collections.abc import Callable, Iterator

import pytest
from correctness.rank_runs import assemble, train_on_rank
from correctness.short_runs import Job, Layout
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions, Parameters
from reference.plain_training import Training

ITERATIONS = 5
GPT = GPTOptions(num_layers=8, vocab_size=37, label_smoothing=0.1)
LLAMA = GPTOptions(
    num_layers=8,
    vocab_size=37,
    tie_embeddings=False,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
)


def job(options: GPTOptions) -> Job:
    """Eight microbatches, of which every second replica has none that counts."""
    return Job(options, microbatches=8, masked_out=(1, 3, 5, 7), iterations=ITERATIONS, warmup=2)


CASES = [
    (Layout(1, "none", replicas=2, overlap=True, bucket_size=3000), GPT),
    (Layout(1, "none", replicas=4), LLAMA),
    (Layout(2, "vocab-2", "zb-h1", replicas=2, overlap=True, bucket_size=3000), GPT),
    (Layout(2, "none", "zb-v", replicas=2, overlap=True), GPT),
    (Layout(2, "vocab-1", "interleaved", replicas=2), LLAMA),
    (Layout(2, "interlaced", replicas=2, overlap=True, bucket_size=1), LLAMA),
]
EIGHT_RANKS = [
    (Layout(4, "none", "1f1b", replicas=2, overlap=True), GPT),
    (Layout(4, "vocab-2", "v-half", replicas=2, bucket_size=3000), LLAMA),
    (Layout(2, "vocab-2", "zb-v", replicas=4, overlap=True), GPT),
    (Layout(2, "naive", "zb-h2", replicas=4, overlap=True), LLAMA),
    (Layout(1, "none", "zb-h1", replicas=8, overlap=True), GPT),
]


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> Callable[[GPTOptions], Training]:
    """What one process makes of a job."""
    done: dict[GPTOptions, Training] = {}

    def of(options: GPTOptions) -> Training:
        if options not in done:
            its_job = job(options)
            initial = start(ranks, its_job)
            done[options] = its_job.reference({n: value.double() for n, value in initial.items()})
        return done[options]

    return of


def start(ranks: RankPool, its_job: Job) -> Parameters:
    """The initial weights of every layout."""
    config = its_job.config(Layout(1, "none"))
    [own] = ranks.run(train_on_rank, 1, config=config, batches=its_job.batches()[:1])
    return assemble([own.initial])


def name_of(value: object) -> str:
    return str(value) if isinstance(value, Layout) else ""


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[RankPool]:
    with RankPool(8) as pool:
        yield pool


@pytest.mark.parametrize(
    ("layout", "options", "pool"),
    [
        *((*case, "ranks") for case in CASES),
        *(pytest.param(*case, "eight_ranks", marks=pytest.mark.full) for case in EIGHT_RANKS),
    ],
    ids=name_of,
)
def test_replicas_train_what_one_process_trains(
    layout: Layout,
    options: GPTOptions,
    pool: str,
    request: pytest.FixtureRequest,
    alone: Callable[[GPTOptions], Training],
) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    its_job, expected = job(options), alone(options)
    by_rank = ranks.run(
        train_on_rank,
        layout.world_size,
        config=its_job.config(layout),
        batches=its_job.batches(),
        evaluation_batches=its_job.batches(seed=1),
        evaluate_after=(ITERATIONS - 1,),
    )
    assert all(own.losses == by_rank[0].losses for own in by_rank)
    assert all(own.gradient_norms == by_rank[0].gradient_norms for own in by_rank)
    assert all(own.evaluations == by_rank[0].evaluations for own in by_rank)
    assert [own.left_in_store for own in by_rank] == [0] * layout.world_size
    assert by_rank[0].losses == pytest.approx(expected.losses, rel=1e-5)
    assert by_rank[0].gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-5)
    assemble([own.final for own in by_rank])  # all copies are equal, to the last bit
    gradients = assemble([own.first_gradients for own in by_rank])
    errors = {
        name: float((gradients[name].double() - value).norm() / value.norm())
        for name, value in expected.first_gradients.items()
    }
    assert max(errors.values()) < 1e-5, errors
