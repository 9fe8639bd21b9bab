"""Tokens that travel by a stand-in for DeepEP train the same mixture as experts with their layer.

The reference is that of ``test_experts``. The stand-in moves fp32, which the package cannot.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from correctness.agreement import errors
from correctness.joined_jobs import config_of, counted_turns, file_of, same
from correctness.rank_runs import RankRun, assemble, train_on_rank
from correctness.short_runs import Layout
from correctness.test_expert_ranks import Known, by_reference, job_of
from correctness.test_experts import ACTIVATIONS, MODELS, PARTS, WHOLE, compare
from harness.marks import full
from harness.rank_pool import RankPool
from parallel.deep_ep_stand_in import Buffer, WideBuffer, installed
from torch import Tensor

from megatron.run.run_config import RunConfig

CASES = [
    ("qwen2", Layout(1, "none", replicas=2, experts=2, dispatcher="flex", recomputation=PARTS)),
    (
        "deepseek",
        Layout(
            2, "vocab-2", "zb-v", replicas=2, experts=2, dispatcher="flex", recomputation=WHOLE
        ),
    ),
    full(
        "mixtral",
        Layout(
            1, "vocab-1", "zb-h1", replicas=4, experts=4, dispatcher="flex", sharded=True,
            overlap=True, recomputation=ACTIVATIONS,
        ),
    ),
    full(
        "deepseek",
        Layout(
            1, "none", tensor=2, sequence=True, replicas=2, experts=4, expert_tensor=1,
            dispatcher="flex",
        ),
    ),
    full("qwen2", Layout(1, "none", "zb-h1", context=2, replicas=2, experts=2, dispatcher="flex")),
    full("gpt-oss", Layout(2, "none", "interleaved", replicas=2, experts=2, dispatcher="flex")),
]  # fmt: skip


@pytest.fixture(scope="module")
def known(ranks: RankPool) -> Known:
    return by_reference(ranks)


class WrongWeights(WideBuffer):
    """Gives each choice that arrives the weight of the token's next choice."""

    def weights_there(self, weights: Tensor) -> Tensor:
        return weights.roll(-1, 1)


class NoGradientOfWeights(WideBuffer):
    """Brings no gradients of weights home."""

    def weights_home(self, weights: Tensor) -> Tensor:
        return torch.zeros_like(weights)


def train(
    rank: int, world_size: int, *, buffer: type[Buffer] = WideBuffer, **kwargs: Any
) -> RankRun:
    """Train as ``train_on_rank`` does, where the stand-in is installed."""
    with installed(buffer) as calls:
        run = train_on_rank(rank, world_size, **kwargs)
    kinds = {kind for kind, _, _ in calls}
    assert kinds == {"dispatch", "dispatch again", "combine"}
    return run


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_visited_experts_train_the_plain_mixture(
    name: str, layout: Layout, ranks: RankPool, known: Known
) -> None:
    job = job_of(MODELS[name])
    runs = ranks.run(
        train,
        layout.world_size,
        config=job.config(layout),
        batches=job.batches(),
        evaluation_batches=job.batches(seed=1),
        evaluate_after=(job.iterations - 1,),
    )
    compare(job, runs, *known(job, layout.replicas))


@pytest.mark.parametrize("buffer", [WrongWeights, NoGradientOfWeights])
def test_a_fault_of_weights_would_be_seen(
    buffer: type[Buffer], ranks: RankPool, known: Known
) -> None:
    job = job_of(MODELS["mixtral"])
    config = job.config(Layout(1, "none", replicas=2, experts=2, dispatcher="flex"))
    _, wanted = known(job, 2)
    runs = ranks.run(train, 2, config=config, batches=job.batches()[:1], buffer=buffer)
    gradients = assemble([own.first_gradients for own in runs])
    found = errors(gradients, wanted.first_gradients)
    assert max(error for name, error in found.items() if "router" in name) > 1e-3


def train_joined(rank: int, world_size: int, **kwargs: Any) -> tuple[RankRun, int]:
    with counted_turns() as turns:
        return train(rank, world_size, **kwargs), turns()


def test_pairs_leave_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    """Results that a pair reads before their event would be NaN."""
    job = replace(job_of(MODELS["deepseek"]), iterations=2)
    layout = Layout(2, "vocab-2", "dualpipe-v", replicas=2, experts=2, dispatcher="flex")
    file = file_of(layout, job.microbatches // layout.replicas, tmp_path)
    layout = replace(layout, schedule="file", file=file)

    def of(overlap: bool) -> list[tuple[RankRun, int]]:
        config: RunConfig = config_of(job, layout, overlap=overlap)
        return ranks.run(train_joined, layout.world_size, config=config, batches=job.batches())

    for (plain, none), (joined, turns) in zip(of(False), of(True), strict=True):
        assert none == 0 < turns
        assert joined.losses == plain.losses
        assert same(joined.first_gradients, plain.first_gradients)
        assert same(joined.final, plain.final)
