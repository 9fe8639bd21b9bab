"""Every pair of properties that a layout of experts can have trains the plain mixture.

The reference is that of ``test_experts``: every expert for every token, masked, in float64.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Final

import pytest
from correctness.cover import Case, pairs_of, sampled_cover
from correctness.joined_jobs import config_of, file_of
from correctness.rank_runs import train_on_rank
from correctness.short_runs import Job, Layout
from correctness.test_expert_ranks import MODELS, Known, by_reference, job_of
from correctness.test_experts import ACTIVATIONS, PARTS, WHOLE, compare
from harness.rank_pool import RankPool

from megatron.layers.recompute import NO_RECOMPUTATION

FACTORS: Final = {
    "experts": (1, 2, 4),
    "tensor": (1, 2),
    "expert_tensor": (1, 2),
    "replicas": (1, 2, 4),
    "ranks": (1, 2, 4),
    "sharded": (False, True),
    "dispatcher": ("allgather", "alltoall"),
    "schedule": ("1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "dualpipe-v"),
    "treatment": ("none", "vocab-1", "vocab-2"),
    "joined": (False, True),
    "again": (NO_RECOMPUTATION, ACTIVATIONS, PARTS, WHOLE),
    "model": tuple(MODELS),
}
CHUNKS: Final = {"1f1b": 1, "zb-h1": 1}


def allowed(case: Case) -> bool:
    """Whether 8 ranks are enough, experts fold over a stage's ranks, and pairs do something."""
    of_stage = case["tensor"] * case["replicas"]
    return bool(
        of_stage * case["ranks"] <= 8
        and of_stage % (case["experts"] * case["expert_tensor"]) == 0
        and (case["replicas"] > 1 or not case["sharded"])
        and (case["experts"] > 1 or not case["joined"])
    )


COVER = sampled_cover(FACTORS, allowed)


def layout_of(case: Case) -> Layout:
    return Layout(
        case["ranks"],
        case["treatment"],
        case["schedule"],
        replicas=case["replicas"],
        sharded=case["sharded"],
        overlap=case["sharded"],
        tensor=case["tensor"],
        sequence=case["tensor"] > 1,
        experts=case["experts"],
        expert_tensor=case["expert_tensor"],
        dispatcher=case["dispatcher"],
        recomputation=case["again"],
    )


def jobs_of(case: Case) -> Iterator[Job]:
    """A model that has a layer for every stage, and microbatches for pairs.

    Over ten iterations some token falls so near the edge of a capacity that fp32 and float64 put it
    on different sides, in one process too: its loss differs by 6e-5. So a model with a capacity
    trains without it, and for three iterations with it where that does not happen.
    """
    options, stages = MODELS[case["model"]], case["ranks"] * CHUNKS.get(case["schedule"], 2)
    microbatches = 12 if case["joined"] and case["replicas"] == 4 else 8
    if options.moe_expert_capacity_factor is not None:
        if stages <= options.num_layers and microbatches == 8:
            yield replace(job_of(options), microbatches=microbatches)
        options = replace(options, moe_expert_capacity_factor=None)
    if stages > options.num_layers:
        pattern = options.moe_layer_pattern
        wider = pattern and (*pattern, *pattern[-1:] * len(pattern))
        options = replace(options, num_layers=8, moe_layer_pattern=wider)
    yield replace(job_of(options, iterations=4), microbatches=microbatches)


def name_of(case: Case) -> str:
    return f"{case['model']}-{layout_of(case)}{'-joined' * case['joined']}"


def test_every_pair_that_eight_ranks_allow_occurs() -> None:
    """Left out: what needs 16 ranks, shards without replicas, and pairs without an exchange."""
    found = set[object]().union(*map(pairs_of, COVER))
    every = {
        tuple(sorted(((first, one), (second, other)), key=lambda item: item[0]))
        for first, second in combinations(FACTORS, 2)
        for one in FACTORS[first]
        for other in FACTORS[second]
    }
    left_out = {frozenset(map("{0[0]} {0[1]}".format, pair)) for pair in every - found}
    assert left_out == {
        frozenset(pair)
        for pair in (
            ("experts 4", "ranks 4"),
            ("replicas 4", "ranks 4"),
            ("replicas 1", "sharded True"),
            ("replicas 1", "experts 4"),
            ("experts 1", "joined True"),
        )
    }


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[RankPool]:
    with RankPool(8) as pool:
        yield pool


@pytest.fixture(scope="module")
def known(ranks: RankPool) -> Known:
    return by_reference(ranks)


@pytest.mark.full
@pytest.mark.parametrize("case", COVER, ids=name_of)
def test_every_pair_trains_the_plain_mixture(
    case: Case, eight_ranks: RankPool, known: Known, tmp_path: Path
) -> None:
    for job in jobs_of(case):
        layout = layout_of(case)
        if case["joined"]:
            file = file_of(layout, job.microbatches // layout.replicas, tmp_path)
            layout = replace(layout, schedule="file", file=file)
        runs = eight_ranks.run(
            train_on_rank,
            layout.world_size,
            config=config_of(job, layout, overlap=case["joined"]),
            batches=job.batches(),
            evaluation_batches=job.batches(seed=1),
            evaluate_after=(job.iterations - 1,),
        )
        compare(job, runs, *known(job, layout.replicas))
