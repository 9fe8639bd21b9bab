"""In float64 the framework's gradients are those of the plain GPT to the last digits.

In fp32 a small mistake hides in the rounding. Here it cannot: loss and gradients of one batch are
compared to 1e-10 for models and batches that together cover every option with every layout.
"""

from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pytest
import torch
from correctness.model_kinds import LIKE
from correctness.rank_runs import assemble, gradients_on_rank
from correctness.short_runs import Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions, random_parameters
from reference.plain_loss import loss_and_gradients


@dataclass(frozen=True)
class GradientCase:
    """A job of one batch."""

    name: str
    job: Job


def case(
    name: str, b: int, m: int, masked_out: tuple[int, ...] = (), **options: Any
) -> GradientCase:
    model = GPTOptions(**{"num_layers": 4, **options})
    return GradientCase(name, Job(model, b, m, masked_out, iterations=1, sequence=6))


CASES = [
    case("uneven vocabulary", 1, 5, vocab_size=61),
    case("even vocabulary", 3, 4, vocab_size=64, tie_embeddings=False),
    case("two entries", 1, 3, vocab_size=2, label_smoothing=0.1),
    case("untied, shards of padding", 1, 2, vocab_size=5, tie_embeddings=False, z_loss_coeff=0.1),
    case("one microbatch", 3, 1, logit_softcap=2.0, tie_embeddings=False),
    case("fewer microbatches than ranks", 1, 2, label_smoothing=0.3, logit_softcap=1.5),
    case("masked out", 3, 6, (0, 3, 5), label_smoothing=0.1, z_loss_coeff=0.1, logit_softcap=3.0),
    case("all but one masked out", 1, 4, (0, 1, 2), tie_embeddings=False, label_smoothing=0.2),
    case(
        "llama",
        1,
        9,
        position_embedding_type="rope",
        rotary_base=500,
        normalization="RMSNorm",
        norm_epsilon=1e-3,
        swiglu=True,
        num_query_groups=2,
        add_bias_linear=False,
        tie_embeddings=False,
    ),
    case(
        "one query group, wide heads, layer norm on queries",
        1,
        3,
        num_query_groups=1,
        kv_channels=6,
        qk_layernorm=True,
        position_embedding_type="rope",
        rotary_percent=0.7,
        z_loss_coeff=1e-2,
        logit_softcap=1.0,
    ),
    case(
        "scaled and interleaved rotation, biases of queries, keys and values, squared relu",
        2,
        3,
        position_embedding_type="rope",
        rotary_base=500_000,
        kv_channels=8,
        rotary_interleaved=True,
        use_rope_scaling=True,
        rope_scaling_factor=4.0,
        add_bias_linear=False,
        add_qkv_bias=True,
        squared_relu=True,
        num_query_groups=2,
    ),
    case(
        "yarn",
        2,
        3,
        position_embedding_type="rope",
        kv_channels=8,
        rope_type="yarn",
        rotary_base=100,
        rotary_scaling_factor=4.0,
        original_max_position_embeddings=8,
        beta_fast=1.0,
        beta_slow=0.25,
        mscale=0.7,
        mscale_all_dim=0.2,
        yarn_exact_range=True,
    ),
    case(
        "rotation by longrope",
        1,
        3,
        position_embedding_type="rope",
        kv_channels=8,
        rotary_percent=0.5,
        rope_type="longrope",
        rotary_base=100,
        rotary_scaling_factor=4.0,
        original_max_position_embeddings=4,
        rope_short_factors=(1.0, 7.0),
        rope_long_factors=(1.5, 3.0),
    ),
    case(
        "dynamic rotation",
        1,
        3,
        position_embedding_type="rope",
        kv_channels=8,
        rope_type="dynamic",
        rotary_base=100,
        rotary_scaling_factor=4.0,
        original_max_position_embeddings=5,
    ),
    case("rms norm on queries", 3, 2, qk_layernorm=True, normalization="RMSNorm", swiglu=True),
]
KINDS = [case(name, 1, 4, **options) for name, options in LIKE.items()]
LAYOUTS = {
    str(layout): layout
    for p in (1, 2, 3, 4)
    for layout in (Layout(p, "none"), Layout(p, "vocab-1"), Layout(p, "vocab-2"))
}


def check(ranks: RankPool, job: Job, layout: Layout) -> None:
    """Compare loss and gradients of the job's first batch with the plain GPT's."""
    parameters = random_parameters(job.options)
    [batch] = job.batches()
    # The angles of rotary embeddings are kept in fp32, whatever the activations are.
    tolerance = 1e-6 if job.options.position_embedding_type == "rope" else 1e-10
    loss, expected = loss_and_gradients(parameters, batch, job.options)
    results = ranks.run(
        gradients_on_rank,
        layout.ranks,
        config=job.config(layout, torch.float64),
        parameters=parameters,
        batch=batch,
    )
    assert [own for own, _ in results] == pytest.approx([loss] * layout.ranks, rel=tolerance)
    gradients = assemble([held for _, held in results])
    assert gradients.keys() == expected.keys()
    errors = {
        name: float((gradients[name] - expected[name]).norm() / expected[name].norm())
        for name in expected
    }
    assert max(errors.values()) < tolerance, errors


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(case, layout, id=f"{case.name}-{layout}")
        for case, other in zip(CASES, cycle(("p2-vocab-1", "p1-vocab-2", "p2-none")), strict=False)
        for layout in ("p4-vocab-2", other)
    ],
)
def test_loss_and_gradients_to_the_last_digits(
    case: GradientCase, layout: str, ranks: RankPool
) -> None:
    check(ranks, case.job, LAYOUTS[layout])


@pytest.mark.full
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith("p3")])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_gradients_in_every_layout(
    case: GradientCase, layout: str, ranks: RankPool
) -> None:
    check(ranks, case.job, LAYOUTS[layout])


@pytest.mark.parametrize(
    "layout", [Layout(2, "vocab-2", "zb-v"), Layout(3, "none", "zb-h1")], ids=str
)
def test_a_split_backward_of_the_newest_options(layout: Layout, ranks: RankPool) -> None:
    [job] = [case.job for case in CASES if case.job.options.squared_relu]
    check(ranks, job, layout)


@pytest.mark.parametrize("layout", [full(Layout(1, "none")), Layout(2, "vocab-2", "zb-v")], ids=str)
@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.name)
def test_kinds_of_layers(case: GradientCase, layout: Layout, ranks: RankPool) -> None:
    check(ranks, case.job, layout)


def test_layers_that_differ_are_told_apart_by_their_place_in_the_model(ranks: RankPool) -> None:
    """Every other layer has a window, and the chunks of a rank do not follow one another."""
    [job] = [case.job for case in KINDS if case.name == "gemma 2"]
    check(ranks, job, Layout(2, "vocab-1", "interleaved"))


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        (Layout(2, "none", "zb-h1", vocab_recompute=True), True),
        (Layout(2, "redis", vocab_recompute=True), False),
        (Layout(2, "naive", vocab_recompute=True), True),
        (Layout(2, "vocab-1", "v-half", vocab_recompute=True), False),
        (Layout(2, "vocab-2", "zb-v", vocab_recompute=True), True),
        (Layout(3, "vocab-2", vocab_recompute=True), False),
        (Layout(2, "interlaced", vocab_recompute=True), True),
    ],
    ids=str,
)
def test_logits_that_are_formed_again(layout: Layout, tied: bool, ranks: RankPool) -> None:
    loss = {"label_smoothing": 0.1, "z_loss_coeff": 0.1, "logit_softcap": 3.0}
    made = case("recomputed", 2, 4, (0, 3), num_layers=6, tie_embeddings=tied, **loss)
    check(ranks, made.job, layout)


@pytest.mark.parametrize("layout", ["p3-none", "p3-vocab-1", "p3-vocab-2"])
def test_an_odd_number_of_ranks(layout: str, ranks: RankPool) -> None:
    options = GPTOptions(num_layers=3, vocab_size=29)
    check(ranks, Job(options, microbatches=4, iterations=1, sequence=6), LAYOUTS[layout])


@pytest.mark.parametrize("vocabulary", ["none", "vocab-1", "vocab-2"])
def test_a_batch_without_any_loss_has_zero_gradients(vocabulary: str, ranks: RankPool) -> None:
    """The plain loss is not defined there; training must go on undisturbed, though."""
    job = Job(GPTOptions(z_loss_coeff=0.1), microbatches=2, masked_out=(0, 1), iterations=1)
    [batch] = job.batches()
    results = ranks.run(
        gradients_on_rank,
        2,
        config=job.config(Layout(2, vocabulary), torch.float64),
        parameters=random_parameters(job.options),
        batch=batch,
    )
    for loss, held in results:
        assert loss == 0
        assert not any(part.any() for _, parts in held.values() for _, part in parts)
