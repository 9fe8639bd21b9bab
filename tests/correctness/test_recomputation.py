"""Recomputation changes no bit of losses and gradients, under any schedule.

Every schedule is trained on two or three ranks, every treatment on both. What is computed again,
the model and whether the embeddings are tied take turns.
"""

from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import torch
from correctness.rank_runs import (
    CPU,
    Pieces,
    assemble,
    factor,
    gradient_pieces,
    make_pipeline_groups,
    parameter_values,
    pieces,
)
from correctness.schedule_cases import each_once, layout
from correctness.short_runs import EIGHT_LAYER_GPT, EIGHT_LAYER_LLAMA, Job
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions
from reference.plain_loss import loss_and_gradients

from megatron.config.run_config import RunConfig
from megatron.layers.recompute import PARTS, Recomputation
from megatron.runtime.batch import to_device
from megatron.training.planning.run_plan import make_run_plan
from megatron.training.setup import build_train_state

WAYS = {
    "core": Recomputation(parts=frozenset({"core_attn"})),
    "uniform": Recomputation(group=1),
    "block": Recomputation(group=1, most=1),
    "parts": Recomputation(parts=frozenset(PARTS)),
    "uniform 2": Recomputation(group=2),
}
CASES = [
    (*case, way, model)
    for case, way, model in zip(
        each_once((2, 3)), cycle(WAYS), cycle((EIGHT_LAYER_GPT, EIGHT_LAYER_LLAMA)), strict=False
    )
]
PRECISIONS = torch.float32, torch.bfloat16

Result = tuple[float, Pieces]


def recomputing(config: RunConfig, way: str) -> RunConfig:
    return replace(config, train=replace(config.train, recomputation=WAYS[way]))


def results(
    rank: int, world_size: int, *, job: Job, configs: list[RunConfig]
) -> tuple[Pieces, list[Result]]:
    """Initial weights; loss and gradients of the first batch under every configuration.

    They share a plan: the order of its passes is the order in which gradients add up.
    """
    groups = make_pipeline_groups()
    run_plan = make_run_plan(configs[0])
    initial: Pieces = {}
    found = []
    for config in configs:
        state = build_train_state(config, groups, run_plan)
        initial = pieces(state, parameter_values)
        statistics = torch.promote_types(config.train.dtype, torch.float32)
        batch = to_device(job.batches()[0], CPU, statistics)
        loss = state.pipeline.train(batch, 0)
        assert loss is not None
        loss = loss.double() * factor(batch)
        groups.pipeline.all_reduce(loss)
        found.append((float(loss), gradient_pieces(state, batch)))
        state.pipeline.close()
    return initial, found


def test_every_way_meets_both_kinds_of_backward() -> None:
    ways = {(way, schedule.startswith(("zb", "v-"))) for schedule, _, _, _, way, _ in CASES}
    assert ways == {(way, split) for way in WAYS for split in (False, True)}


@pytest.mark.parametrize(
    ("schedule", "treatment", "p", "tied", "way", "model"),
    CASES,
    ids=[f"{case[0]}-{case[1]}-{case[2]}-{case[4]}" for case in CASES],
)
def test_recomputed_layers_give_the_same_bits(
    schedule: str,
    treatment: str,
    p: int,
    tied: bool,
    way: str,
    model: GPTOptions,
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    """With dropout, in both precisions; and without it, as the plain GPT does."""
    options = replace(model, num_layers=4 * p, tie_embeddings=tied)
    job = Job(options, microbatches=5, iterations=1, dropout=0.2)
    still = replace(job, dropout=0.0)
    spread = layout(schedule, treatment, p, tmp_path)
    plain = [job.config(spread, dtype) for dtype in PRECISIONS]
    again = [recomputing(config, way) for config in (*plain, still.config(spread))]
    by_rank = ranks.run(results, p, job=job, configs=[*plain, *again])
    for rank, (_, found) in enumerate(by_rank):
        for dtype, one, other in zip(PRECISIONS, found[:2], found[2:4], strict=True):
            assert one[0] == other[0], (rank, dtype)
            assert_same_bits(one[1], other[1])
    initial = assemble([own for own, _ in by_rank])
    loss, gradients = loss_and_gradients(
        {name: value.double() for name, value in initial.items()}, job.batches()[0], options
    )
    *_, (own_loss, _) = by_rank[0][1]
    assert own_loss == pytest.approx(loss, rel=1e-5)
    own = assemble([found[-1][1] for _, found in by_rank])
    assert own.keys() == gradients.keys()
    for name, value in gradients.items():
        assert float((own[name].double() - value).norm()) <= 1e-5 * float(value.norm()), name


def assert_same_bits(one: Pieces, other: Pieces) -> None:
    assert one.keys() == other.keys()
    for name, (_, parts) in one.items():
        for (box, value), (other_box, other_value) in zip(parts, other[name][1], strict=True):
            assert box == other_box
            assert torch.equal(value, other_value), name
