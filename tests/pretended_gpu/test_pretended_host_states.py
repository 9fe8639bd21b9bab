"""States of the optimizer on the host, on GPUs that are not there: order, lifetimes and memory."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from correctness.short_runs import Job, Layout
from cuda_path import needs_pretended_gpus
from harness.marks import full
from harness.precisions import precision
from pretended_gpu.paper_memory import memory, moving, paper_config
from pretended_gpu.pool import GpuPool
from pretended_gpu.rank import Findings, run_rank
from pretended_gpu.sound import assert_sound
from reference.plain_gpt import GPTOptions

from megatron.optimizer.host_optimizer import HostOptimizer
from megatron.optimizer.settings import HostStateSettings
from megatron.run.run_config import RunConfig
from megatron.simulator.costs.accuracy import ALLOCATED_WITHIN

pytestmark = needs_pretended_gpus

JOB = Job(GPTOptions(num_layers=2, vocab_size=64), microbatches=3)


def with_states(config: RunConfig, states: HostStateSettings) -> RunConfig:
    return replace(config, train=replace(config.train, host_states=states))


def run(config: RunConfig, rank: int) -> Findings:
    return run_rank(config, rank, valid=False)


def run_without_waiting_for_weights(config: RunConfig, rank: int) -> Findings:
    with patch.object(HostOptimizer, "_finish", lambda self: None):
        return run_rank(config, rank, iterations=2, valid=False)


@pytest.mark.parametrize(
    ("layout", "dtype", "states"),
    [
        (
            Layout(2, "vocab-2"),
            torch.bfloat16,
            HostStateSettings(overlap_cpu_optimizer_d2h_h2d=True),
        ),
        full(
            Layout(2, "none"), torch.float32, HostStateSettings(overlap_cpu_optimizer_d2h_h2d=True)
        ),
        full(Layout(2, "vocab-2"), torch.bfloat16, HostStateSettings(True, 0.5)),
        full(
            Layout(2, "vocab-1", "zb-h1"),
            torch.bfloat16,
            HostStateSettings(
                overlap_cpu_optimizer_d2h_h2d=True, pins_gradients=False, pins_weights=False
            ),
        ),
    ],
    ids=str,
)
def test_copies_are_sound(
    layout: Layout, dtype: torch.dtype, states: HostStateSettings, gpus: GpuPool
) -> None:
    """Streams are ordered wherever weights and gradients are copied, and nothing grows."""
    config = with_states(JOB.config(layout, dtype), states)
    assert_sound(gpus.map(run, config, ranks=layout.world_size))


def test_passes_that_do_not_wait_for_weights_are_found(gpus: GpuPool) -> None:
    config = with_states(
        JOB.config(Layout(1, "none"), torch.bfloat16),
        HostStateSettings(overlap_cpu_optimizer_d2h_h2d=True),
    )
    [found] = gpus.map(run_without_waiting_for_weights, config, ranks=1)
    assert any("which it does not wait for" in fault for fault in found.faults), found.faults


@pytest.mark.full
@pytest.mark.parametrize(
    ("states", "chunks"),
    [
        (HostStateSettings(overlap_cpu_optimizer_d2h_h2d=True), None),
        (HostStateSettings(), 1),
        (HostStateSettings(True, 0.5), 1),
    ],
    ids=str,
)
def test_memory_is_what_a_dry_run_says(
    states: HostStateSettings, chunks: int | None, gpus: GpuPool
) -> None:
    """On the GPU and on its host: masters, moments, slots; activations beside them."""
    config = paper_config(Layout(2, "vocab-2"), 32_000, layers=2)
    own = memory(with_states(moving(config, chunks), states), gpus)
    assert own.faults == []
    assert own.allocated == pytest.approx(own.predicted, rel=ALLOCATED_WITHIN)
    assert own.host == pytest.approx(own.host_predicted, rel=0.01)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_memory_of_half_the_shards_is_what_a_dry_run_says(
    dtype: torch.dtype, gpus: GpuPool
) -> None:
    """Replicas choose different parameters; the count has the fullest of them.

    The CPU takes a bucket's step within the program, so the host waits for its gradients.
    """
    layout = Layout(1, "none", replicas=2, sharded=True, bucket_size=20_000_000)
    config = paper_config(layout, 8_000, layers=1, sequence=512)
    config = replace(moving(config, None), train=replace(config.train, precision=precision(dtype)))
    own = memory(with_states(config, HostStateSettings(True, 0.5)), gpus)
    assert all("the host waits" in fault for fault in own.faults), own.faults
    assert max(own.allocated) == pytest.approx(own.predicted[0], rel=ALLOCATED_WITHIN)
    assert max(own.host) == pytest.approx(own.host_predicted[0], rel=0.01)
