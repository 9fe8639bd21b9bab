"""Passes that are captured once and replayed give the bits of passes that are launched anew."""

import dataclasses
from unittest.mock import patch

import pytest
import torch
from correctness.rank_runs import Batches, RankRun, train_on_rank
from correctness.recorded_graph import RecordedGraph, recorded_graphs
from correctness.short_runs import EIGHT_LAYER_GPT, EIGHT_LAYER_LLAMA, Job, Layout
from harness.rank_pool import RankPool
from reference.plain_gpt import GPTOptions

from megatron.layers.recompute import Recomputation
from megatron.run.run_config import RunConfig

EACH_LAYER = Recomputation(group=1)
PARTS = Recomputation(parts=frozenset({"core_attn", "layernorm", "mlp"}))

LAYOUTS = [
    Layout(1, "none"),
    Layout(2, "none"),
    Layout(2, "vocab-1"),
    Layout(2, "vocab-2", schedule="zb-h1"),
    Layout(2, "vocab-1", schedule="zb-v"),
    Layout(2, "none", schedule="zb-v"),
    Layout(2, "vocab-2", recomputation=EACH_LAYER),
    Layout(2, "vocab-2", schedule="zb-h1", recomputation=PARTS),
    Layout(2, "vocab-2", replicas=2, overlap=True, sharded=True),
]
SHARED_LAYERS = [
    (EIGHT_LAYER_GPT, Layout(1, "none", tensor=2)),
    (EIGHT_LAYER_LLAMA, Layout(1, "vocab-2", tensor=2, sequence=True)),
    (EIGHT_LAYER_LLAMA, Layout(2, "vocab-2", schedule="zb-h1", tensor=2, sequence=True)),
    (EIGHT_LAYER_GPT, Layout(2, "vocab-1", schedule="zb-v", tensor=2, recomputation=PARTS)),
]
"""Whose passes have collectives."""

CASES = [(o, layout) for layout in LAYOUTS for o in (EIGHT_LAYER_GPT, EIGHT_LAYER_LLAMA)]


def replayed(
    rank: int, world_size: int, *, config: RunConfig, batches: Batches
) -> tuple[RankRun, int]:
    """Train with graphs; return what the run left, and how many passes were replayed."""
    before = RecordedGraph.replays
    config = dataclasses.replace(
        config, train=dataclasses.replace(config.train, captures_passes=True)
    )
    with patch("megatron.training.setup.cuda_graphs", recorded_graphs):
        run = train_on_rank(rank, world_size, config=config, batches=batches)
    return run, RecordedGraph.replays - before


@pytest.mark.parametrize(
    ("options", "layout"),
    CASES + SHARED_LAYERS,
    ids=lambda value: {EIGHT_LAYER_GPT: "gpt", EIGHT_LAYER_LLAMA: "llama"}.get(value, str(value)),
)
def test_graphs_change_no_bit(options: GPTOptions, layout: Layout, ranks: RankPool) -> None:
    """With other data in every microbatch, more of them than slots, and weights that change."""
    job = Job(options, microbatches=5, iterations=3)
    config, batches = job.config(layout), job.batches()
    plain = ranks.run(train_on_rank, layout.world_size, config=config, batches=batches)
    found = ranks.run(replayed, layout.world_size, config=config, batches=batches)
    for expected, (run, replays) in zip(plain, found, strict=True):
        assert run.losses == expected.losses
        assert run.gradient_norms == expected.gradient_norms
        assert run.after_steps == expected.after_steps
        assert run.first_gradients.keys() == expected.first_gradients.keys()
        for name, (_, pieces) in run.first_gradients.items():
            for (_, own), (_, other) in zip(pieces, expected.first_gradients[name][1], strict=True):
                assert torch.equal(own, other), name
        assert replays > 0
