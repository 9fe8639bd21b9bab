"""Evaluation gives the plain GPT's loss in every layout and leaves training as it was."""

from typing import NamedTuple

import pytest
from correctness.rank_runs import assemble, train_on_rank
from correctness.short_runs import LAYOUTS, Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions, Parameters
from reference.plain_loss import loss_and_gradients

JOB = Job(
    GPTOptions(num_layers=4, vocab_size=37, z_loss_coeff=1e-2, logit_softcap=3.0),
    micro_batch_size=3,
    microbatches=3,
    masked_out=(1,),
    iterations=4,
)


class Evaluated(NamedTuple):
    """Losses of the iterations and of the evaluations, and the whole model at the end."""

    losses: list[float]
    evaluations: list[float]
    final: Parameters


def run(ranks: RankPool, job: Job, layout: Layout, evaluate_after: tuple[int, ...]) -> Evaluated:
    results = ranks.run(
        train_on_rank,
        layout.ranks,
        config=job.config(layout),
        batches=job.batches(),
        evaluation_batches=job.batches(seed=1),
        evaluate_after=evaluate_after,
    )
    assert all(own.evaluations == results[0].evaluations for own in results)
    return Evaluated(
        results[0].losses, results[0].evaluations, assemble([own.final for own in results])
    )


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_evaluation_under_every_treatment(layout: Layout, ranks: RankPool) -> None:
    """After the last iteration, so that the reference can evaluate the weights that came out.

    As in Megatron-LM, all tokens that count in an evaluation have the same weight.
    """
    result = run(ranks, JOB, layout, evaluate_after=(JOB.iterations - 1,))
    weights = {name: value.double() for name, value in result.final.items()}
    expected, _ = loss_and_gradients(weights, JOB.evaluated, JOB.options)
    assert result.evaluations == pytest.approx([expected], rel=1e-6)


@pytest.mark.parametrize(
    "layout",
    [x if x.vocabulary == "vocab-2" else full(x) for x in LAYOUTS if x.ranks == 2],
    ids=str,
)
def test_training_goes_on_as_if_nothing_had_been_evaluated(layout: Layout, ranks: RankPool) -> None:
    """Even with dropout, which evaluation does without."""
    job = Job(JOB.options, microbatches=3, iterations=4, dropout=0.2)
    without = run(ranks, job, layout, evaluate_after=())
    between = run(ranks, job, layout, evaluate_after=(0, 2))
    assert len(between.evaluations) == 2
    assert between.losses == without.losses


def test_evaluation_has_no_dropout(ranks: RankPool) -> None:
    """Two runs whose weights have not changed yet evaluate alike with and without dropout."""
    first = [
        run(
            ranks,
            Job(JOB.options, microbatches=3, iterations=2, lr=0.0, dropout=dropout),
            Layout(2, "vocab-2"),
            evaluate_after=(0,),
        )
        for dropout in (0.0, 0.5)
    ]
    assert first[0].evaluations == first[1].evaluations
    assert first[0].losses != first[1].losses
