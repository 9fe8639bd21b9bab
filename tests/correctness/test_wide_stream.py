"""With a residual stream in fp32 a run in 16 bits is closer to the truth, alike in every layout."""

import math
from dataclasses import replace

import pytest
import torch
from correctness.rank_runs import assemble, gradients_on_rank
from correctness.short_runs import Job, Layout
from correctness.test_loss_scale import assert_same, train_scaled
from correctness.test_narrow_gradients import MODELS, squared_errors
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import Parameters, random_parameters
from reference.plain_loss import loss_and_gradients

from megatron.model.ownership import WORD_EMBEDDINGS
from megatron.run.run_config import RunConfig


def widened(config: RunConfig) -> RunConfig:
    wide = replace(config.train.precision, fp32_residual_connection=True)
    return replace(config, train=replace(config.train, precision=wide))


@pytest.mark.parametrize("model", [x if x == "llama" else full(x) for x in MODELS])
def test_errors_are_smaller_and_stages_change_nothing(model: str, ranks: RankPool) -> None:
    options = MODELS[model]
    job = Job(options, micro_batch_size=2, microbatches=6, iterations=1)
    rounded = random_parameters(options, dtype=torch.bfloat16)
    [batch] = job.batches()
    wide = {name: value.double() for name, value in rounded.items()}
    _, exact = loss_and_gradients(wide, batch, options)

    def gradients(config: RunConfig) -> Parameters:
        results = ranks.run(
            gradients_on_rank,
            config.parallel.pipeline.size,
            config=config,
            parameters=rounded,
            batch=batch,
        )
        return assemble([held for _, held in results])

    def error(found: Parameters) -> float:
        return math.sqrt(sum(squared_errors(found, exact).values()))

    alone, apart = (job.config(Layout(p, "none"), torch.bfloat16) for p in (1, 2))
    in_fp32 = gradients(widened(alone))
    assert error(in_fp32) < 0.9 * error(gradients(alone))
    in_stages = gradients(widened(apart))
    for name, gradient in in_fp32.items():
        if options.tie_embeddings and name == WORD_EMBEDDINGS:  # two copies are added up
            assert (in_stages[name] - gradient).norm() < 1e-6 * gradient.norm()
        else:
            assert torch.equal(in_stages[name], gradient), name
    assert error(gradients(widened(job.config(Layout(2, "vocab-2", "zb-v"), torch.bfloat16)))) < (
        0.95 * error(gradients(apart))
    )


def test_forwards_that_are_begun_in_vain_send_the_same_tensors(ranks: RankPool) -> None:
    job = Job(MODELS["llama"], microbatches=4, iterations=4, warmup=1)
    config = widened(job.config(Layout(2, "vocab-2"), torch.bfloat16))
    waited, guessed = (
        ranks.run(
            train_scaled,
            2,
            config=replace(
                config, optimizer=replace(config.optimizer, clip_grad=1e-3, post_validation=later)
            ),
            batches=job.batches(),
        )
        for later in (False, True)
    )
    assert all(one.step_redone for one in guessed[0].finished)
    assert_same(waited, guessed)
