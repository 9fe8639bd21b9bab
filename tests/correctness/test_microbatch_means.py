"""The mean of microbatch means, Megatron-LM's default where a mask leaves tokens out.

The plain GPT divides by the sum of all masks. If the mask of every microbatch is multiplied by the
same sum over its own, each microbatch has the same share, as in Megatron-LM, whose loss is the sum
of each microbatch's losses, divided by its number of tokens that count and by the number of
microbatches. The loss that Megatron-LM prints is the mean over all tokens that count.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from correctness.rank_runs import RankRun, assemble, train_on_rank
from correctness.short_runs import Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions
from reference.plain_loss import RandomMicrobatch, loss_and_gradients
from reference.plain_training import Training, train

JOB = Job(
    GPTOptions(num_layers=4, vocab_size=37, tie_embeddings=False),
    microbatches=4,
    sequence=12,
    iterations=3,
    warmup=1,
    lr=1e-2,
)
"""Clipping is at work, so the norm matters."""

MIXTURE = replace(
    JOB,
    options=replace(
        JOB.options,
        num_experts=4,
        moe_ffn_hidden_size=12,
        moe_router_topk=2,
        moe_aux_loss_coeff=0.1,
        add_bias_linear=False,
    ),
)
"""Its routers' losses are means over microbatches too, and so are those of further tokens."""
AHEAD = replace(JOB, options=replace(JOB.options, mtp_num_layers=1))
BOTH = replace(MIXTURE, options=replace(MIXTURE.options, mtp_num_layers=1, moe_aux_loss_coeff=0.0))
"""Without a loss of routers: as in Megatron-Core, the router of a further token's layer also counts
positions of which no further token is known, where the plain GPT cuts its sequences."""

ONE = Layout(1, "none")
RUNS = [
    ("dense", ONE, False),
    ("dense", Layout(2, "vocab-2"), True),
    full("dense", Layout(2, "vocab-1", "zb-h1"), False),
    full("dense", Layout(2, "naive"), False),
    ("dense", Layout(1, "vocab-2", tensor=2, sequence=True), False),
    ("dense", Layout(1, "none", context=2), False),
    full("dense", Layout(2, "vocab-2", slices=2), False),
    ("dense", Layout(1, "none", replicas=2, overlap=True, sharded=True), False),
    full("dense", Layout(2, "vocab-2", context=2), False),
    ("mixture", ONE, False),
    full("mixture", Layout(2, "vocab-2"), False),
    full("mixture", Layout(1, "none", context=2), False),
    ("ahead", ONE, False),
    ("both", ONE, False),
    full("ahead", Layout(2, "vocab-2"), False),
    full("ahead", Layout(1, "none", context=2), False),
]


def uneven(job: Job) -> list[list[RandomMicrobatch]]:
    """Batches of a job whose microbatches keep very different numbers of tokens."""
    batches = job.batches()
    for batch in batches:
        for number, own in enumerate(batch):
            own.loss_mask[:, : 2 * number] = 0
    return batches


def weighed(batches: Sequence[Sequence[RandomMicrobatch]]) -> list[list[RandomMicrobatch]]:
    """The batches with masks in float64 that give every microbatch the same share."""
    return [
        [replace(m, loss_mask=m.loss_mask.double() / m.loss_mask.double().sum()) for m in batch]
        for batch in batches
    ]


def reference(by_rank: Sequence[RankRun], job: Job) -> Training:
    start = assemble([own.initial for own in by_rank])
    in_float64 = {name: value.double() for name, value in start.items()}
    return train(in_float64, weighed(uneven(job)), job.learning_rates(), job.options, job.adamw)


JOBS: dict[str, Job] = {"dense": JOB, "mixture": MIXTURE, "ahead": AHEAD, "both": BOTH}


@pytest.mark.parametrize(("kind", "layout", "post_validation"), RUNS, ids=str)
def test_every_microbatch_has_the_same_weight(
    kind: str, layout: Layout, post_validation: bool, ranks: RankPool
) -> None:
    job = JOBS[kind]
    config = job.config(layout)
    config = replace(
        config,
        data=replace(config.data, eod_mask_loss=True),
        optimizer=replace(config.optimizer, post_validation=post_validation),
    )
    by_rank: list[RankRun] = ranks.run(
        train_on_rank, layout.world_size, config=config, batches=uneven(job)
    )
    expected, [first, *_] = reference(by_rank, job), uneven(job)
    found = by_rank[0]
    assert found.gradient_norms == pytest.approx(expected.gradient_norms, rel=1e-4)
    start = {k: v.double() for k, v in assemble([own.initial for own in by_rank]).items()}
    over_tokens, others = loss_and_gradients(start, first, job.options)
    assert found.losses[0] == pytest.approx(over_tokens, rel=1e-5)
    norm = float(torch.cat([own.flatten() for own in others.values()]).norm())
    assert found.gradient_norms[0] != pytest.approx(norm, rel=1e-2), "the weights matter"
    for depths, theirs in zip(found.depth_losses, expected.depth_losses, strict=True):
        assert list(depths) == pytest.approx(theirs, rel=1e-4)
    for of_layers, their_own in zip(found.layer_losses, expected.layer_losses, strict=True):
        assert of_layers == pytest.approx(their_own, rel=1e-4)
    final = assemble([own.final for own in by_rank])
    for name, value in expected.parameters.items():
        torch.testing.assert_close(final[name].double(), value, rtol=0, atol=2e-4, msg=name)


def test_the_printed_loss_is_a_mean_over_tokens(ranks: RankPool) -> None:
    """After steps too, at the weights of the reference."""
    config = JOB.config(ONE)
    config = replace(config, data=replace(config.data, eod_mask_loss=True))
    by_rank: list[RankRun] = ranks.run(train_on_rank, 1, config=config, batches=uneven(JOB))
    start = {name: value.double() for name, value in assemble([by_rank[0].initial]).items()}
    batches, weights = uneven(JOB), start
    for done, batch in enumerate(batches):
        if done:
            weights = train(
                start,
                weighed(batches[:done]),
                JOB.learning_rates()[:done],
                JOB.options,
                JOB.adamw,
            ).parameters
        expected, _ = loss_and_gradients(weights, batch, JOB.options)
        assert by_rank[0].losses[done] == pytest.approx(expected, rel=1e-5)
