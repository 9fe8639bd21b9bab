"""In fp16 the scaled gradients are about as close to the truth as those of a plain GPT in fp16.

As in bf16 (``test_bf16_gradients``), the truth is the plain GPT in float64 with the same weights,
and the plain GPT in fp16 with the same loss scale says how much rounding may do.
"""

import math

import pytest
import torch
from correctness.rank_runs import assemble, gradients_on_rank
from correctness.short_runs import Job, Layout
from correctness.test_bf16_gradients import MODELS, ONE_PARAMETER, WHOLE_MODEL, squared_errors
from harness.rank_pool import RankPool
from reference.plain_gpt import random_parameters
from reference.plain_loss import loss_and_gradients

SCALE = 2.0**12
"""Large enough that few gradients are subnormal, small enough that none overflows."""


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, "vocab-2"),
        Layout(2, "vocab-1", "zb-v"),
        Layout(3, "naive", "zb-h1"),
        Layout(2, "interlaced"),
        Layout(2, "none", "interleaved"),
    ],
    ids=str,
)
@pytest.mark.parametrize("model", MODELS)
def test_errors_are_those_of_rounding(model: str, layout: Layout, ranks: RankPool) -> None:
    options = MODELS[model]
    job = Job(options, micro_batch_size=2, microbatches=6, masked_out=(1,), iterations=1)
    rounded = random_parameters(options, dtype=torch.float16)
    [batch] = job.batches()
    wide = {name: value.double() for name, value in rounded.items()}
    loss, exact = loss_and_gradients(wide, batch, options, SCALE)
    _, in_fp16 = loss_and_gradients(rounded, batch, options, SCALE)
    results = ranks.run(
        gradients_on_rank,
        layout.ranks,
        config=job.config(layout, torch.float16),
        parameters=rounded,
        batch=batch,
        loss_scale=SCALE,
    )
    assert [own / SCALE for own, _ in results] == pytest.approx([loss] * layout.ranks, rel=1e-4)
    ours = squared_errors(assemble([held for _, held in results]), exact)
    plain = squared_errors(in_fp16, exact)
    times = {name: math.sqrt(ours[name] / plain[name]) for name in exact}
    assert max(times.values()) < ONE_PARAMETER, times
    assert math.sqrt(sum(ours.values()) / sum(plain.values())) < WHOLE_MODEL
