"""Steps by apex's ``FusedAdam`` on GPUs that are not there: order, waits and memory."""

from dataclasses import replace

import pytest
import torch
from correctness.short_runs import Job, Layout
from cuda_path import needs_pretended_gpus
from optimizer.apex_stand_in import installed
from pretended_gpu.pool import GpuPool
from pretended_gpu.rank import Findings, run_rank
from pretended_gpu.sound import assert_sound
from reference.plain_gpt import GPTOptions

from megatron.run.run_config import RunConfig

pytestmark = [needs_pretended_gpus, pytest.mark.full]


def run(config: RunConfig, rank: int) -> Findings:
    with installed():
        return run_rank(config, rank, number_of_others=100.0)


@pytest.mark.parametrize(
    ("layout", "post_validation"),
    [
        (Layout(2, "vocab-2"), True),
        (Layout(2, "vocab-1", replicas=2, sharded=True, overlap=True), False),
    ],
    ids=["a step that is undone", "sharded steps"],
)
def test_streams_and_memory_are_in_order(
    layout: Layout, post_validation: bool, gpus: GpuPool
) -> None:
    """What other ranks send is 100, so that a step on a guess has to be taken back."""
    config = Job(GPTOptions(num_layers=2), microbatches=3).config(layout, torch.bfloat16)
    optimizer = replace(
        config.optimizer, implementation="apex", post_validation=post_validation, clip_grad=5
    )
    config = replace(config, optimizer=optimizer)
    found = gpus.map(run, config, ranks=config.parallel.grid.world_size)
    assert_sound(found)
    assert (found[0].restored > 0) == post_validation
