"""Messages of an iteration, counted by hand from the schedule."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from correctness.short_runs import Job, Layout
from reference.plain_gpt import GPTOptions

from megatron.planning.message_memory import kept_messages
from megatron.planning.run_plan import make_run_plan
from megatron.run.precision import PrecisionSettings
from megatron.run.run_config import RunConfig
from megatron.schedules.lower import lower

M = 4
JOB = Job(
    GPTOptions(num_layers=8, vocab_size=64, hidden_size=16),
    micro_batch_size=2,
    microbatches=M,
    sequence=8,
)
ONE = 2 * 8 * 16 * 2
"""Bytes of a message: samples, tokens, hidden size, bytes of bf16."""


def kept(layout: Layout, options: GPTOptions = JOB.options, **train: Any) -> list[float]:
    config: RunConfig = replace(JOB, options=options).config(layout, torch.bfloat16)
    config = replace(config, train=replace(config.train, **train))
    run_plan = make_run_plan(config)
    return kept_messages(config, lower(run_plan.plan, run_plan.costs))


@pytest.mark.parametrize(
    ("layout", "by_rank"),
    [
        (Layout(1, "none"), [0]),
        # the ends send an activation and receive a gradient, or the other way round
        (Layout(2, "vocab-2"), [2, 2]),
        (Layout(4, "vocab-2"), [2, 4, 4, 2]),
        # stages 0 to 3 are on ranks 0, 1, 0, 1: both ranks have an end of each of three links
        (Layout(2, "vocab-2", "interleaved"), [6, 6]),
        # stages 0 to 3 are on ranks 0, 1, 1, 0: the middle link is within rank 1
        (Layout(2, "vocab-2", "zb-v"), [4, 4]),
    ],
    ids=str,
)
def test_every_message_of_an_iteration_may_be_kept(layout: Layout, by_rank: list[int]) -> None:
    assert kept(layout) == [number * M * ONE for number in by_rank]


@pytest.mark.parametrize(
    ("layout", "share"),
    [
        (Layout(2, "vocab-2", tensor=2), 1.0),
        (Layout(2, "vocab-2", tensor=2, sequence=True), 0.5),
        (Layout(2, "vocab-2", context=2), 0.5),
        (Layout(2, "vocab-2", slices=4), 1.0),
    ],
    ids=str,
)
def test_ranks_that_share_tokens_share_messages_and_slices_do_not(
    layout: Layout, share: float
) -> None:
    assert kept(layout) == [share * 2 * M * ONE] * 2


@pytest.mark.parametrize(("wide", "stream"), [(False, 1), (True, 2)])
def test_messages_behind_further_tokens_have_all_depths_in_16_bits(wide: bool, stream: int) -> None:
    """Two further tokens, predicted on rank 1: three activations go on to ranks 2 and 3."""
    options = replace(JOB.options, position_embedding_type="rope", mtp_num_layers=2)
    precision = PrecisionSettings(bf16=True, fp32_residual_connection=wide)
    found = kept(Layout(4, "vocab-2", stages="Et*6|ttmm||L"), options, precision=precision)
    assert found == [count * M * ONE for count in (2 * stream, 2 * stream + 6, 6 + 6, 6)]


def test_a_wide_stream_has_messages_in_fp32() -> None:
    wide = PrecisionSettings(bf16=True, fp32_residual_connection=True)
    assert kept(Layout(2, "vocab-2"), precision=wide) == [2 * 2 * M * ONE] * 2
