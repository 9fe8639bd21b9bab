"""A rank beside stand-ins, on a pretended GPU: its streams are ordered as NCCL would order them."""

import pytest
from cuda_path import needs_pretended_gpus
from pretended_gpu.lone import run_lone_rank
from pretended_gpu.pool import GpuPool

from tools.gpu_sections.overlap import SMALL
from tools.gpu_sections.peers import Blocks

pytestmark = needs_pretended_gpus


@pytest.mark.full
def test_stand_ins_are_ordered_with_the_passes(gpus: GpuPool) -> None:
    [[faults, pairs, launches]] = gpus.map(run_lone_rank, SMALL, 4, ranks=1)
    assert faults == []
    assert pairs
    blocks = Blocks()
    assert {own for own, _, _ in launches} >= {blocks.transfers, blocks.tensor}
    streams = {stream for _, stream, _ in launches}
    assert len(streams) > 4, "each link and each group has a stream of its own"
    assert "passes" not in {stream for own, stream, _ in launches if own == blocks.transfers}
