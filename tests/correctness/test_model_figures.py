"""Zeros of the gradient and norm of the weights are the plain GPT's under every layout."""

import math
from dataclasses import replace

import pytest
import torch
from correctness.rank_runs import RankRun, assemble, train_on_rank
from correctness.short_runs import Job, Layout
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions, Parameters
from reference.plain_loss import loss_and_gradients
from reference.plain_training import train

# Without biases: that of the keys has no gradient, of which rounding leaves now 0, now something.
TIED = GPTOptions(num_layers=4, vocab_size=61, add_bias_linear=False)
UNTIED = replace(TIED, tie_embeddings=False)  # rows of tokens that do not occur have no gradient
RUNS = [
    (UNTIED, Layout(1, "none"), False),
    (UNTIED, Layout(2, "vocab-2", "zb-h1"), False),
    (UNTIED, Layout(2, "vocab-1"), True),
    (UNTIED, Layout(1, "vocab-2", replicas=2), False),
    (UNTIED, Layout(2, "none", replicas=2, sharded=True, overlap=True), False),
    (TIED, Layout(2, "none"), False),  # two copies of one matrix
]


def job(options: GPTOptions) -> Job:
    return Job(options, microbatches=2, iterations=3)


def norm(weights: Parameters) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in weights.values()))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("options", "layout", "post_validation"), RUNS, ids=[str(layout) for _, layout, _ in RUNS]
)
def test_every_iteration_has_the_models_figures(
    options: GPTOptions, layout: Layout, post_validation: bool, ranks: RankPool
) -> None:
    task = job(options)
    config = task.config(layout)
    config = replace(
        config,
        optimizer=replace(config.optimizer, post_validation=post_validation),
        log=replace(config.log, log_num_zeros_in_grad=True, log_params_norm=True),
    )
    by_rank: list[RankRun] = ranks.run(
        train_on_rank, layout.world_size, config=config, batches=task.batches()
    )
    assert all(own.num_zeros == by_rank[0].num_zeros for own in by_rank)
    assert all(own.params_norms == by_rank[0].params_norms for own in by_rank)
    weights = {k: v.double() for k, v in assemble([own.initial for own in by_rank]).items()}
    zeros, norms = [], []
    for count, batch in enumerate(task.batches(), start=1):
        _, gradients = loss_and_gradients(weights, batch, options)
        zeros.append(sum(int((value == 0).sum()) for value in gradients.values()))
        rates, batches = task.learning_rates()[:count], task.batches()[:count]
        start = assemble([own.initial for own in by_rank])
        start = {k: v.double() for k, v in start.items()}
        weights = train(start, batches, rates, options, task.adamw).parameters
        norms.append(norm(weights))
    assert by_rank[0].num_zeros == zeros
    assert by_rank[0].params_norms == pytest.approx(norms, rel=1e-6)
    if not options.tie_embeddings:
        assert zeros[0] > 16 * 10, "the gradient should have rows of zeros"


def test_bf16_weights_count_as_the_forward_reads_them(ranks: RankPool) -> None:
    task = job(UNTIED)
    config = task.config(Layout(2, "vocab-2"), torch.bfloat16)
    config = replace(config, log=replace(config.log, log_params_norm=True))
    by_rank: list[RankRun] = ranks.run(train_on_rank, 2, config=config, batches=task.batches())
    final = assemble([own.final for own in by_rank])
    assert by_rank[0].params_norms[-1] == pytest.approx(norm(final), rel=1e-6)
    assert by_rank[0].num_zeros == [None] * 3
