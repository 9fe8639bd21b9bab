"""Replicas of a pipeline train what one process trains on the whole global batch."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from correctness.rank_runs import RankRun, assemble, check_agreement, train_on_rank
from correctness.short_runs import EIGHT_LAYER_GPT, EIGHT_LAYER_LLAMA, Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions, Parameters
from reference.plain_training import Training

from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.sharded import ShardedOptimizer
from megatron.parallel import collectives
from megatron.parallel.groups import ConnectedAxis
from megatron.schedules import buckets
from megatron.schedules.buckets import Places, Touch

ITERATIONS = 5
GPT = replace(EIGHT_LAYER_GPT, label_smoothing=0.1)
LLAMA = EIGHT_LAYER_LLAMA


def job(options: GPTOptions) -> Job:
    """Eight microbatches, of which every second replica has none that counts."""
    return Job(options, microbatches=8, masked_out=(1, 3, 5, 7), iterations=ITERATIONS, warmup=2)


CASES = [
    (Layout(1, "none", replicas=4, overlap=True, bucket_size=3000, sharded=True), GPT),
    (Layout(2, "vocab-1", "interleaved", replicas=2, overlap=True, sharded=True), LLAMA),
]
MORE = [
    (Layout(2, "vocab-2", "zb-v", replicas=2, overlap=True, sharded=True), GPT),
    (Layout(2, "interlaced", replicas=2, overlap=True, bucket_size=1), LLAMA),
    (Layout(1, "none", replicas=2, overlap=True, bucket_size=3000), GPT),
    (Layout(2, "vocab-2", "zb-h1", replicas=2, overlap=True, bucket_size=3000), GPT),
    (Layout(2, "none", replicas=2, bucket_size=3000, sharded=True), GPT),
    (Layout(1, "none", replicas=4), LLAMA),
    (Layout(2, "none", "zb-v", replicas=2, overlap=True), GPT),
    (Layout(2, "vocab-1", "interleaved", replicas=2), LLAMA),
]
EIGHT_RANKS = [
    (Layout(4, "none", "1f1b", replicas=2, overlap=True), GPT),
    (Layout(4, "vocab-2", "v-half", replicas=2, bucket_size=3000), LLAMA),
    (Layout(2, "vocab-2", "zb-v", replicas=4, overlap=True), GPT),
    (Layout(2, "naive", "zb-h2", replicas=4, overlap=True), LLAMA),
    (Layout(1, "none", "zb-h1", replicas=8, overlap=True), GPT),
    (Layout(1, "none", replicas=8, overlap=True, sharded=True), LLAMA),
    (Layout(4, "vocab-2", "v-half", replicas=2, overlap=True, sharded=True), GPT),
    (Layout(2, "interlaced", "zb-h1", replicas=4, bucket_size=3000, sharded=True), LLAMA),
    (Layout(4, "redis", "interleaved", replicas=2, overlap=True, sharded=True), GPT),
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
        *(full(*case, "ranks") for case in MORE),
        *(full(*case, "eight_ranks") for case in EIGHT_RANKS),
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
    check_agreement(by_rank)
    assert by_rank[0].losses == pytest.approx(expected.losses, rel=1e-5)
    assert by_rank[0].gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-5)
    assemble([own.final for own in by_rank])  # all copies are equal, to the last bit
    gradients = assemble([own.first_gradients for own in by_rank])
    errors = {
        name: float((gradients[name].double() - value).norm() / value.norm())
        for name, value in expected.first_gradients.items()
    }
    assert max(errors.values()) < 1e-5, errors


TWO = Layout(1, "none", replicas=2, bucket_size=3000)
FOUR = replace(TWO, replicas=4)
TWO_BY_TWO = Layout(2, "vocab-2", "zb-v", replicas=2, bucket_size=3000)


@pytest.mark.parametrize(
    ("plain", "optimizer", "dtype"),
    [
        (TWO, "adam", torch.float32),
        full(FOUR, "adam", torch.float32),
        full(FOUR, "muon", torch.bfloat16),
        full(TWO_BY_TWO, "adam", torch.bfloat16),
        pytest.param(FOUR, "adam", torch.bfloat16, marks=pytest.mark.full),
        pytest.param(TWO_BY_TWO, "adam", torch.float32, marks=pytest.mark.full),
        pytest.param(TWO_BY_TWO, "muon", torch.bfloat16, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_sharding_overlap_and_guessing_change_no_bit(
    plain: Layout, optimizer: Literal["adam", "muon"], dtype: torch.dtype, ranks: RankPool
) -> None:
    """Also with clipping at work, so that some guesses of post-validation are wrong."""
    its_job = job(GPT)

    def run(layout: Layout, *, guess: bool = False) -> tuple[list[float], list[float], Parameters]:
        config = its_job.config(layout, dtype)
        chosen = replace(config.optimizer, post_validation=guess, optimizer=optimizer)
        config = replace(config, optimizer=chosen)
        by_rank = ranks.run(
            train_on_rank, layout.world_size, config=config, batches=its_job.batches()
        )
        final = assemble([own.final for own in by_rank])
        return by_rank[0].losses, by_rank[0].gradient_norms, final

    losses, norms, final = run(plain)
    assert any(norm > its_job.adamw.clip_grad for norm in norms)
    others = [replace(plain, overlap=overlap, sharded=True) for overlap in (False, True)]
    runs = [run(replace(plain, overlap=True)), *map(run, others)]
    if plain.ranks > 1:
        runs += [run(plain, guess=True), run(others[0], guess=True)]
    for other_losses, other_norms, other_final in runs:
        assert other_losses == losses
        assert other_norms == norms
        assert all(torch.equal(other_final[name], final[name]) for name in final)


def early(places: Mapping[Touch, Places], after: Iterable[Touch]) -> int:
    """The place behind the first pass that adds to a bucket: all others have time to come later."""
    return min(places[touch].first for touch in after if touch in places)


def with_fault(rank: int, world_size: int, *, fault: str, **arguments: Any) -> RankRun:
    """Train with something broken on purpose."""
    with pytest.MonkeyPatch.context() as patch:
        if fault == "reduced too early":
            patch.setattr(buckets, "last_touch", early)
        elif fault == "read before it is gathered":
            patch.setattr(ShardedOptimizer, "gather", lambda self, bucket: None)
            patch.setattr(ShardedOptimizer, "open", open_anyway)
        elif rank == 0:  # the other replica has no token that counts
            patch.setattr(collectives, "reduce_scatter", lose_own(collectives.reduce_scatter))
        return train_on_rank(rank, world_size, **arguments)


def open_anyway(self: ShardedOptimizer, rates: Rates, grad_norm: float, factor: float) -> None:
    """Open a step although the weights of the last one were not gathered."""
    vars(self)["_to_gather"].clear()
    OPEN(self, rates, grad_norm, factor)


OPEN = ShardedOptimizer.open


def lose_own(
    reduce_scatter: Callable[[torch.Tensor, ConnectedAxis, Sequence[int]], None],
) -> Callable[[torch.Tensor, ConnectedAxis, Sequence[int]], None]:
    def losing(tensor: torch.Tensor, axis: ConnectedAxis, sizes: Sequence[int]) -> None:
        tensor.zero_()
        reduce_scatter(tensor, axis, sizes)

    return losing


@pytest.mark.parametrize(
    "fault", ["reduced too early", "read before it is gathered", "a rank's gradient is lost"]
)
def test_injected_faults_are_found(
    fault: str, ranks: RankPool, alone: Callable[[GPTOptions], Training]
) -> None:
    layout = Layout(1, "none", replicas=2, overlap=True, bucket_size=3000, sharded=True)
    its_job, expected = job(GPT), alone(GPT)
    by_rank = ranks.run(
        with_fault,
        layout.world_size,
        fault=fault,
        config=its_job.config(layout),
        batches=its_job.batches(),
    )
    losses = by_rank[0].losses
    assert losses != pytest.approx(expected.losses, rel=1e-5)
