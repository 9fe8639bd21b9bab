"""Replicas and all that goes with them: every pair of two factors trains as one process does."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import pytest
from correctness.agreement import errors, joined
from correctness.cover import Case, cover, pairs_of
from correctness.rank_runs import assemble, train_on_rank
from correctness.short_runs import EIGHT_LAYER_GPT as GPT
from correctness.short_runs import EIGHT_LAYER_LLAMA as LLAMA
from correctness.short_runs import Job, Layout
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions
from reference.plain_training import Training

ITERATIONS = 4
FACTORS: Final = {
    "schedule": ("1f1b", "interleaved", "zb-h1", "zb-v", "v-half"),
    "treatment": ("none", "vocab-1", "vocab-2", "interlaced"),
    "replicas": (1, 2, 4),
    "ranks": (1, 2, 4),
    "sharded": (False, True),
    "overlap": (False, True),
    "tied": (False, True),
    "model": ("gpt", "llama"),
}


def allowed(case: Case) -> bool:
    """Whether 8 ranks are enough."""
    return bool(case["replicas"] * case["ranks"] <= 8)


CASES = cover(FACTORS, allowed)


def name_of(case: Case) -> str:
    layout = layout_of(case)
    return f"{layout}-{case['model']}{'-tied' * case['tied']}"


def layout_of(case: Case) -> Layout:
    return Layout(
        case["ranks"],
        case["treatment"],
        case["schedule"],
        replicas=case["replicas"],
        overlap=case["overlap"],
        sharded=case["sharded"],
        bucket_size=3000,
    )


def options_of(model: str, tied: bool) -> GPTOptions:
    return replace(GPT if model == "gpt" else LLAMA, tie_embeddings=tied)


def job_of(case: Case) -> Job:
    """16 microbatches, of which the last replica has none that counts if there are 4."""
    options = options_of(case["model"], case["tied"])
    return Job(options, microbatches=16, masked_out=(3, 7, 11, 15), iterations=ITERATIONS, warmup=2)


def test_every_pair_of_two_factors_occurs() -> None:
    found = set().union(*map(pairs_of, CASES))
    for (first, ones), (second, others) in (
        (a, b) for a in FACTORS.items() for b in FACTORS.items() if a[0] < b[0]
    ):
        for one in ones:
            for other in others:
                too_many = {first, second} == {"ranks", "replicas"} and one == other == 4
                assert (((first, one), (second, other)) in found) != too_many
    assert all(map(allowed, CASES))


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[RankPool]:
    with RankPool(8) as pool:
        yield pool


@pytest.fixture(scope="module")
def alone(eight_ranks: RankPool) -> Callable[[Case], Training]:
    """What one process makes of the job of a case, in plain PyTorch and float64."""
    done: dict[tuple[str, bool], Training] = {}

    def of(case: Case) -> Training:
        key = case["model"], case["tied"]
        if key not in done:
            job = job_of(case)
            config = job.config(Layout(1, "none"))
            [own] = eight_ranks.run(train_on_rank, 1, config=config, batches=job.batches()[:1])
            initial = assemble([own.initial])
            done[key] = job.reference({name: value.double() for name, value in initial.items()})
        return done[key]

    return of


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_losses_norms_gradients_and_weights_are_those_of_one_process(
    case: Case, eight_ranks: RankPool, alone: Callable[[Case], Training]
) -> None:
    layout, job, expected = layout_of(case), job_of(case), alone(case)
    by_rank = eight_ranks.run(
        train_on_rank, layout.world_size, config=job.config(layout), batches=job.batches()
    )
    assert by_rank[0].losses == pytest.approx(expected.losses, rel=1e-5)
    assert by_rank[0].gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-5)
    gradients = assemble([own.first_gradients for own in by_rank])
    assert max(errors(gradients, expected.first_gradients).values()) < 1e-5
    final = assemble([own.final for own in by_rank])
    # Adam turns even a gradient that is only rounding into a step, such as that of a key's bias.
    assert max(errors(final, expected.parameters).values()) < 5e-3
    [whole] = errors({"": joined(final)}, {"": joined(expected.parameters)}).values()
    assert whole < 1e-5
