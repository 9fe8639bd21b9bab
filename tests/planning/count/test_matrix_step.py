"""The step of Muon for one matrix: FLOPs and collectives by hand."""

import pytest
from planning.count.counting import run_of

from megatron.optimizer.settings import MuonSettings, OptimizerSettings, SharedMatrices
from megatron.parallel.settings import TensorRankSettings
from megatron.planning.count.matrix_step import count_matrix_step
from megatron.simulator.costs.count import Collective, Matrix, Work

STEPS = 5
FC1, FC2 = "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"


def step(matrix: Matrix, mode: SharedMatrices = "duplicated", ranks: int = 1) -> Work:
    muon = MuonSettings(muon_tp_mode=mode)
    optimizer = OptimizerSettings(lr=1.0, optimizer="muon", muon=muon)
    return count_matrix_step(
        run_of(optimizer=optimizer, sizes={"tensor": TensorRankSettings(ranks)}), matrix
    )


def flops(m: int, n: int) -> int:
    """Return the FLOPs of Newton-Schulz for [m, n], m <= n: X Xᵀ, A A and B X in every step."""
    return STEPS * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)


def sent(work: Work) -> list[tuple[str, int]]:
    return [(own.kind, own.bytes) for own in work.steps if isinstance(own, Collective)]


@pytest.mark.parametrize(("rows", "columns"), [(64, 256), (320, 64), (64, 64)])
def test_flops_are_those_of_the_shape(rows: int, columns: int) -> None:
    work = step(Matrix(FC1, (rows, columns), (rows, columns)))
    assert work.flops == flops(min(rows, columns), max(rows, columns))
    assert sent(work) == []


def test_experts_and_fused_projections_count_matrix_by_matrix() -> None:
    stack = step(Matrix("experts.linear_fc1.weight", (4 * 128, 64), (4 * 128, 64), stacked=4))
    assert stack.flops == 4 * flops(64, 128)
    h = run_of().model.hidden_size
    fused = step(Matrix("self_attention.linear_qkv.weight", (3 * h, h), (3 * h, h)))
    assert fused.flops == 3 * flops(h, h)


def test_ranks_that_share_a_matrix_gather_sum_or_send_nothing() -> None:
    """[64, 256] in fp32 on 4 ranks, which cut the longer side."""
    matrix = Matrix(FC2, (64, 64), (64, 256))
    gathered, summed, alone = (
        step(matrix, mode, ranks=4) for mode in ("duplicated", "distributed", "blockwise")
    )
    assert gathered.flops == flops(64, 256)
    assert sent(gathered) == [("all_gather", 64 * 256 * 4)]
    assert summed.flops == STEPS * (4 * 64 * 64 * 256 // 4 + 2 * 64**3)
    norm, *products = sent(summed)
    assert norm == ("all_reduce", 4)
    assert products == STEPS * [("all_reduce", 64 * 64 * 2)]
    assert (alone.flops, sent(alone)) == (flops(64, 64), [])


def test_gate_and_up_of_each_rank_are_gathered_as_one_matrix() -> None:
    gathered = step(Matrix(FC1, (64, 32), (256, 32), pieces=2), ranks=4)
    assert gathered.flops == flops(32, 256)
    assert sent(gathered) == [("all_gather", 256 * 32 * 4)]
