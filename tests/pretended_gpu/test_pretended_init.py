"""Initial weights on a GPU that is not there: no wait, no fault, and little memory."""

from dataclasses import dataclass, replace
from typing import Final
from unittest.mock import patch

import pytest
import torch
from correctness.short_runs import Layout
from cuda_path import needs_pretended_gpus
from pretended_gpu.gpu import DEVICE, PretendedGpu
from pretended_gpu.paper_memory import paper_config
from pretended_gpu.pool import GpuPool

from megatron.model.init import BLOCK_ROWS
from megatron.model.stage import RankModel
from megatron.parallel.groups import single_rank
from megatron.planning.run_plan import make_run_plan
from megatron.training.setup import build_train_state

pytestmark = needs_pretended_gpus

WIDEST: Final = 4 * 3072
"""Numbers in the longest row of the model."""


@dataclass(frozen=True)
class Drawn:
    """What the draw of a model has left.

    Attributes:
        faults: found in it.
        weights: bytes held before and after it.
        peak: most bytes held until its end.
        trained: bytes held once gradients and the optimizer's states are there.
    """

    faults: list[str]
    weights: tuple[int, int]
    peak: int
    trained: int


def draw(on_cpu: bool, rank: int) -> Drawn:
    config = paper_config(Layout(1, "none"), 32_000, layers=2)
    config = replace(config, train=replace(config.train, use_cpu_initialization=on_cpu))
    run_plan = make_run_plan(config)
    found: list[Drawn] = []
    initialise = RankModel.initialise
    with PretendedGpu() as gpu:

        def watched(self: RankModel, seed: int, *, on_cpu: bool) -> None:
            before = gpu.memory.held
            with gpu.without_waiting():
                initialise(self, seed, on_cpu=on_cpu)
            weights = before, gpu.memory.held
            found.append(Drawn(list(gpu.faults), weights, gpu.memory.peak, 0))

        with patch.object(RankModel, "initialise", watched):
            state = build_train_state(config, single_rank(DEVICE), run_plan)
        [drawn] = found
        held = gpu.memory.held
        state.pipeline.close()
    return Drawn(drawn.faults, drawn.weights, drawn.peak, held)


def test_the_host_waits_for_nothing_and_memory_stays_below_what_training_takes(
    gpus: GpuPool,
) -> None:
    [drawn] = gpus.map(draw, False, ranks=1)
    assert drawn.faults == []
    before, after = drawn.weights
    assert before == after
    assert drawn.peak <= after + 4 * BLOCK_ROWS * WIDEST
    assert drawn.peak < drawn.trained


def test_what_the_cpu_draws_is_waited_for(gpus: GpuPool) -> None:
    """So the test above would see it."""
    [drawn] = gpus.map(draw, True, ranks=1)
    assert any("between host and device" in fault for fault in drawn.faults)


def draw_by_a_generator_of_the_cpu(rank: int) -> None:
    with PretendedGpu():
        torch.empty(8, device=DEVICE).normal_(0.0, 1.0, generator=torch.Generator())


def test_a_generator_of_another_device_is_refused(gpus: GpuPool) -> None:
    with pytest.raises(RuntimeError, match="a generator of cpu draws for"):
        gpus.map(draw_by_a_generator_of_the_cpu, ranks=1)
