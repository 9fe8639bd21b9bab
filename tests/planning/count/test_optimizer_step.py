"""Bytes of a step of the optimizer for each parameter, by hand."""

from typing import Any

import pytest
import torch
from harness.precisions import precision
from planning.count.counting import run_of

from megatron.optimizer.settings import OptimizerSettings
from megatron.planning.count.optimizer import StepCount, count_step

PARTIAL_SUMS = 0.02
"""Bytes a parameter of the norm's sums of blocks, and more."""


def step(*, matrix: bool = True, gradient: torch.dtype = torch.float32, **how: Any) -> StepCount:
    types = precision(torch.bfloat16, narrow_gradients=gradient == torch.bfloat16)
    run = run_of(optimizer=OptimizerSettings(lr=1.0, **how), precision=types)
    return count_step(run, matrix=matrix)


@pytest.mark.parametrize(
    ("how", "state", "moved"),
    [
        # master and two moments; read gradient, read and write each of them, write the weight
        ({}, 4 + 2 * 4, 4 + 2 * (4 + 4 + 4) + 2),
        ({"exp_avg_dtype": "bf16"}, 4 + 2 + 4, 4 + 2 * (4 + 2 + 4) + 2),
        (
            {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
            4 + 2 * 2,
            4 + 2 * (4 + 2 + 2) + 2,
        ),
        # PyTorch's kernel writes the clipped gradient too; another copies the master to the weight
        ({"optimizer": "sgd"}, 4 + 4, 2 * (4 + 4 + 4) + (4 + 2)),
    ],
    ids=["adam", "a narrow moment", "narrow moments", "sgd"],
)
@pytest.mark.parametrize("matrix", [False, True])
def test_a_step_moves_each_tensor_once_and_the_norm_reads_the_gradient(
    how: dict[str, Any], state: int, moved: int, matrix: bool
) -> None:
    found = step(matrix=matrix, **how)
    assert (found.state, found.gradient, found.flops) == (state, 4, 0)
    assert found.moved == pytest.approx(moved, abs=1e-5)  # and a divisor
    assert 0 <= found.normed - 4 <= PARTIAL_SUMS


def test_a_gradient_in_bf16_is_half_as_wide() -> None:
    wide, narrow = step(), step(gradient=torch.bfloat16)
    assert (wide.gradient, narrow.gradient) == (4, 2)
    assert narrow.state == wide.state
    assert wide.moved - narrow.moved == wide.normed - narrow.normed == 2


def test_muon_keeps_one_moment_of_matrices_and_multiplies_them() -> None:
    """Each of five steps of Newton-Schulz has three products, of 2 h FLOPs a number of [h, h]."""
    assert step(optimizer="muon").state == 4 + 4
    assert step(optimizer="muon").flops == 5 * 3 * 2 * 2048
    assert step(optimizer="muon", matrix=False).state == 4 + 2 * 4
    assert step(optimizer="muon", matrix=False).flops == 0
