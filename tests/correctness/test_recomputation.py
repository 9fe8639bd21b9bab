"""Recomputation changes no bit of losses and gradients, under any schedule, in B or before it.

Every schedule is trained on two or three ranks, every treatment on both. What is computed again,
the model and whether the embeddings are tied take turns.
"""

from collections.abc import Callable
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
    train_on_rank,
)
from correctness.schedule_cases import each_once, layout
from correctness.short_runs import EIGHT_LAYER_GPT, EIGHT_LAYER_LLAMA, Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions
from reference.plain_loss import loss_and_gradients

from megatron.layers.recompute import NO_RECOMPUTATION, PARTS, Recomputation
from megatron.planning.run_plan import make_run_plan
from megatron.run.run_config import RunConfig
from megatron.runtime.batch import to_device
from megatron.schedules.check import check
from megatron.schedules.plan import Plan, with_recomputation
from megatron.training.setup import build_train_state

WAYS = {
    "core": Recomputation(parts=frozenset({"core_attn"})),
    "uniform": Recomputation(group=1),
    "block": Recomputation(group=1, most=1),
    "parts": Recomputation(parts=frozenset(PARTS)),
    "uniform 2": Recomputation(group=2),
    "activation": Recomputation(parts=frozenset({"layernorm", "mlp_act"})),
}
CASES = [
    (*case, way, model)
    for case, way, model in zip(
        each_once((2, 3)), cycle(WAYS), cycle((EIGHT_LAYER_GPT, EIGHT_LAYER_LLAMA)), strict=False
    )
]
SPLIT = ("zb", "v-")
"""Beginnings of the schedules with a split backward."""

QUICK = {case[4]: (*case[:2], 2, *case[3:]) for case in CASES if case[0].startswith(SPLIT)}.values()
"""One for every way, on two ranks."""

PRECISIONS = torch.float32, torch.bfloat16

Placement = Callable[[Plan], Plan]


def within_b(plan: Plan) -> Plan:
    return plan


def after_f(plan: Plan) -> Plan:
    """R as early as it may be."""
    rows = (
        tuple(
            part
            for item in row
            for part in ((item, item._replace(kind="R")) if item.kind == "F" else (item,))
        )
        for row in plan.rows
    )
    return replace(plan, rows=tuple(rows))


Result = tuple[float, Pieces]


def recomputing(config: RunConfig, way: str) -> RunConfig:
    return replace(config, train=replace(config.train, recomputation=WAYS[way]))


def results(
    rank: int, world_size: int, *, job: Job, configs: list[tuple[RunConfig, Placement]]
) -> tuple[Pieces, list[Result]]:
    """Initial weights; loss and gradients of the first batch under every configuration.

    They share a plan, but for R: the order of its passes is that in which gradients add up.
    """
    groups = make_pipeline_groups()
    shared = make_run_plan(configs[0][0])
    initial: Pieces = {}
    found = []
    for config, placed in configs:
        run_plan = replace(shared, plan=placed(shared.plan))
        check(run_plan.plan)
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
    ways = {(way, schedule.startswith(SPLIT)) for schedule, _, _, _, way, _ in CASES}
    assert ways == {(way, split) for way in WAYS for split in (False, True)}


@pytest.mark.parametrize(
    ("schedule", "treatment", "p", "tied", "way", "model"),
    [
        pytest.param(
            *case,
            marks=() if case in QUICK else pytest.mark.full,
            id=f"{case[0]}-{case[1]}-{case[2]}-{case[4]}",
        )
        for case in dict.fromkeys((*QUICK, *CASES))
    ],
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
    configs = [(config, within_b) for config in (*plain, *again[:2])]
    if WAYS[way].group:
        configs += [(again[0], with_recomputation), (again[1], after_f)]
    configs.append((again[-1], with_recomputation if WAYS[way].group else within_b))
    by_rank = ranks.run(results, p, job=job, configs=configs)
    for rank, (_, found) in enumerate(by_rank):
        for number, other in enumerate(found[2:-1]):
            one = found[number % 2]
            assert one[0] == other[0], (rank, number)
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


SHARING = Layout(2, "vocab-2", "zb-h1", tensor=2, sequence=True)
REPLICAS = Layout(2, "vocab-1", "v-half", replicas=2, sharded=True, overlap=True)


@pytest.mark.parametrize(
    ("layout", "way", "dtype", "post_validation"),
    [
        full(SHARING, "uniform", torch.float32, False),
        full(REPLICAS, "block", torch.float32, False),
        (Layout(2, "vocab-2", "zb-v"), "uniform", torch.bfloat16, True),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (replace(SHARING, vocabulary="none"), "uniform 2", torch.float32, False),
                (SHARING, "uniform", torch.bfloat16, False),
                (REPLICAS, "block", torch.bfloat16, False),
                (replace(REPLICAS, schedule="1f1b"), "uniform", torch.bfloat16, True),
                (Layout(2, "none", "interleaved"), "block", torch.bfloat16, True),
            )
        ),
    ],
    ids=str,
)
def test_r_changes_no_bit_of_a_run(
    layout: Layout, way: str, dtype: torch.dtype, post_validation: bool, ranks: RankPool
) -> None:
    """Three iterations with dropout; passes are placed anew, those of a kind in their order.

    Clipping is at work, so that a step before the norm is known is a wrong guess, and done again.
    """
    job = Job(
        replace(EIGHT_LAYER_LLAMA, num_layers=4), 2, 8, iterations=3, dropout=0.2, sequence=12
    )
    found = []
    for again, ahead in ((NO_RECOMPUTATION, None), (WAYS[way], 1), (WAYS[way], 2)):
        config = job.config(replace(layout, recomputation=again, recompute_ahead=ahead), dtype)
        optimizer = replace(config.optimizer, post_validation=post_validation)
        config = replace(config, optimizer=optimizer)
        assert make_run_plan(config).plan.recomputes == (ahead is not None)
        found.append(
            ranks.run(train_on_rank, layout.world_size, config=config, batches=job.batches())
        )
    plain, *others = found
    for runs in others:
        for one, other in zip(plain, runs, strict=True):
            assert one.losses == other.losses
            assert one.gradient_norms == other.gradient_norms
            assert one.after_steps == other.after_steps
            assert other.left_in_store == 0


def assert_same_bits(one: Pieces, other: Pieces) -> None:
    assert one.keys() == other.keys()
    for name, (_, parts) in one.items():
        for (box, value), (other_box, other_value) in zip(parts, other[name][1], strict=True):
            assert box == other_box
            assert torch.equal(value, other_value), name
