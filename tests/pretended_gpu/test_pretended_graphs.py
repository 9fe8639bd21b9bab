"""The memory of captured passes: bytes that slots hold on pretended GPUs, and a dry run's."""

from dataclasses import replace
from typing import Any

import pytest
from correctness.short_runs import Layout
from cuda_path import needs_pretended_gpus
from harness.marks import full
from pretended_gpu.paper_memory import memory, paper_config
from pretended_gpu.pool import GpuPool
from pretended_gpu.rank import Findings, run_rank

from megatron.layers.recompute import Recomputation
from megatron.layers.vocabulary.settings import ShardSettings
from megatron.run.run_config import RunConfig
from megatron.simulator.costs.gpus import WORKSPACES

pytestmark = needs_pretended_gpus

TOO_LOW, TOO_HIGH = 0.005, 0.01
"""Largest share by which a dry run counts fewer or more bytes than are allocated.

Without graphs it counts exactly. With them it counts about one activation [n, h] too many for
every slot of a stage behind the first (0.68 % of this model under ``zb-v``, whose last rank has
eight such slots); the cause is not known.
"""

LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
}
FURTHER = {"mtp_num_layers": 1, "position_embedding_type": "rope"}
EACH_LAYER = Recomputation(group=1)


def run_pooled(config: RunConfig, rank: int) -> Findings:
    """Two iterations: the second one has the optimizer's moments, and replays all graphs."""
    return run_rank(config, rank, iterations=2, valid=False, pooled=True)


def captured(config: RunConfig) -> RunConfig:
    return replace(config, train=replace(config.train, captures_passes=True))


@pytest.mark.parametrize(
    ("layout", "options", "recomputes"),
    [
        (Layout(2, "vocab-2", "zb-h1"), {}, False),
        full(Layout(1, "none"), {}, False),
        full(Layout(2, "none", "zb-h1"), LLAMA, False),
        full(Layout(2, "vocab-1"), LLAMA, True),
        full(Layout(3, "vocab-2"), {}, True),
        full(Layout(2, "vocab-1", "zb-v"), {}, False),
        full(Layout(2, "vocab-2", "interleaved"), {}, False),
        full(Layout(2, "vocab-2", tensor=2, sequence=True), LLAMA, False),
        full(Layout(2, "vocab-2", "zb-h1", recomputation=EACH_LAYER), {}, False),
        full(Layout(2, "vocab-2", "zb-h1"), FURTHER, False),
    ],
    ids=str,
)
def test_memory_of_slots_is_what_a_dry_run_says(
    layout: Layout, options: dict[str, Any], recomputes: bool, gpus: GpuPool
) -> None:
    """Graphs keep the memory of as many microbatches as are in flight, also between iterations."""
    config = paper_config(layout, 32_000, layers=4 * layout.ranks, **options)
    parallel = replace(config.parallel, vocabulary=ShardSettings(vocab_recompute=recomputes))
    config = captured(replace(config, parallel=parallel))
    own = memory(config, gpus, run_pooled)
    assert own.faults == []
    for allocated, predicted in zip(own.allocated, own.predicted, strict=True):
        assert (1 - TOO_LOW) * allocated < predicted < (1 + TOO_HIGH) * allocated


def test_captures_multiply_with_workspaces_of_their_own(gpus: GpuPool) -> None:
    """Two threads multiply, each on the stream of the passes and on that of captures."""
    config = captured(paper_config(Layout(1, "none"), 4096, layers=1, sequence=128))
    [found] = gpus.map(run_pooled, config, ranks=1)
    assert found.workspaces == 2 * WORKSPACES
