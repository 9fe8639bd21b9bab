"""Training agrees with the plain GPT: every layout, every iteration, every parameter, in fp32."""

from collections.abc import Callable

import pytest
import torch
from correctness.rank_runs import RankRun, assemble, train_on_rank
from correctness.short_runs import LAYOUTS, Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions, Parameters
from reference.plain_training import Training

Runs = Callable[[str, Layout], list[RankRun]]

JOBS = {
    "tied": Job(
        GPTOptions(num_layers=4, vocab_size=61, label_smoothing=0.1),
        microbatches=7,
        masked_out=(2,),
    ),
    "untied": Job(
        GPTOptions(
            num_layers=4,
            vocab_size=37,
            tie_embeddings=False,
            position_embedding_type="rope",
            normalization="RMSNorm",
            swiglu=True,
            num_query_groups=2,
            add_bias_linear=False,
            z_loss_coeff=1e-2,
            logit_softcap=3.0,
        ),
        micro_batch_size=3,
        microbatches=3,
        masked_out=(0,),
    ),
    "one-microbatch": Job(
        GPTOptions(
            num_layers=4,
            vocab_size=6,  # half of the four shards are nothing but padding
            qk_layernorm=True,
            position_embedding_type="rope",
            rotary_percent=0.5,
            label_smoothing=0.2,
            z_loss_coeff=1e-2,
            logit_softcap=2.0,
        ),
        micro_batch_size=3,
        microbatches=1,
    ),
}

CASES = [
    (name, layout) if (place - place // 3) % 3 == number else full(name, layout)
    for number, name in enumerate(JOBS)
    for place, layout in enumerate(LAYOUTS)
]
"""Every layout trains one of the jobs by default: each number of ranks and each treatment all."""


@pytest.fixture(scope="module")
def runs(ranks: RankPool) -> Runs:
    """Every run once, for all tests of this module."""
    done: dict[tuple[str, Layout], list[RankRun]] = {}

    def run(name: str, layout: Layout) -> list[RankRun]:
        if (name, layout) not in done:
            job = JOBS[name]
            done[name, layout] = ranks.run(
                train_on_rank, layout.ranks, config=job.config(layout), batches=job.batches()
            )
        return done[name, layout]

    return run


@pytest.fixture(scope="module")
def references(runs: Runs) -> Callable[[str], Training]:
    """The plain GPT's run of every job in float64, from the framework's initial weights."""
    done: dict[str, Training] = {}

    def reference(name: str) -> Training:
        if name not in done:
            job = JOBS[name]
            [alone] = runs(name, LAYOUTS[0])
            start = assemble([alone.initial])
            done[name] = job.reference({key: value.double() for key, value in start.items()})
        return done[name]

    return reference


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((actual.double() - expected).norm() / expected.norm())


def whole(job: Job, by_rank: list[RankRun], what: str) -> Parameters:
    return assemble([getattr(own, what) for own in by_rank])


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_losses_and_gradient_norms_of_every_iteration(
    name: str, layout: Layout, runs: Runs, references: Callable[[str], Training]
) -> None:
    expected = references(name)
    by_rank = runs(name, layout)
    assert all(own.losses == by_rank[0].losses for own in by_rank)
    assert by_rank[0].losses == pytest.approx(expected.losses, rel=1e-5)
    assert by_rank[0].gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-5)
    assert max(expected.gradient_norms) > JOBS[name].adamw.clip_grad, "nothing was clipped"


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_gradients_of_every_parameter(
    name: str, layout: Layout, runs: Runs, references: Callable[[str], Training]
) -> None:
    expected = references(name).first_gradients
    gradients = whole(JOBS[name], runs(name, layout), "first_gradients")
    assert gradients.keys() == expected.keys()
    errors = {key: relative_error(gradients[key], expected[key]) for key in expected}
    # Softmax sees no constant, so the gradient of a bias of keys cancels and has fewer digits. Its
    # error is measured by the gradient of the whole norm that has the bias.
    for key in [key for key in errors if key.endswith("k_layernorm.bias")]:
        weight = key.removesuffix("bias") + "weight"
        both = torch.stack([expected[key].norm(), expected[weight].norm()]).norm()
        errors[key] = float((gradients[key].double() - expected[key]).norm() / both)
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_initial_weights_do_not_depend_on_the_layout(name: str, layout: Layout, runs: Runs) -> None:
    job = JOBS[name]
    alone = whole(job, runs(name, LAYOUTS[0]), "initial")
    spread = whole(job, runs(name, layout), "initial")
    assert alone.keys() == spread.keys()
    assert all(torch.equal(alone[key], spread[key]) for key in alone)


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_weights_after_training(
    name: str, layout: Layout, runs: Runs, references: Callable[[str], Training]
) -> None:
    """Adam turns even a gradient that is only rounding into a step, so this is not as exact."""
    expected = references(name).parameters
    final = whole(JOBS[name], runs(name, layout), "final")
    errors = {key: relative_error(final[key], expected[key]) for key in expected}
    assert max(errors.values()) < 5e-3, errors
