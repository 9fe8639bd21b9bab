"""What the benchmark compares with trains the same model: same loss, same gradients."""

from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron.layers.main_grad import main_grad_of
from megatron.parallel.groups import single_rank
from megatron.runtime.batch import to_device
from megatron.training.setup import build_train_state
from tools.benchmarking.case import BenchmarkCase

if TYPE_CHECKING:
    from harness.rank_pool import RankPool

Gradients = dict[str, torch.Tensor]


def case(schedule: str, ranks: int, treatment: str = "none") -> BenchmarkCase:
    return BenchmarkCase(96, schedule, treatment, ranks, 6, 32, 4, 4, 16, "float32", "cpu")


def ours() -> tuple[float, Gradients]:
    """Loss and gradients of one iteration in this framework, on one rank."""
    own = case("1f1b", ranks=1)
    groups = single_rank(torch.device("cpu"))
    state = build_train_state(own.run_config(), groups)
    loss = state.pipeline.train(to_device(own.batch(), groups.device), iteration=0)
    assert loss is not None
    return float(loss), {p.name: main_grad_of(p.parameter) for p in state.parameters}


def of_rank(rank: int, world_size: int, schedule: str) -> tuple[float, Gradients]:
    """The same from one rank of a reference."""
    from tools.benchmarking.references import MAKE

    own = case(schedule, world_size)
    reference = MAKE[schedule](own, torch.device("cpu"))
    loss = reference.prepare(own.microbatches)()
    stages = (stage.named_parameters() for stage in reference.stages)
    found = {name: p.grad for own in stages for name, p in own if p.grad is not None}
    return loss, {name: whole(gradient) for name, gradient in found.items()}


def whole(gradient: torch.Tensor) -> torch.Tensor:
    """All of a gradient of which every rank may have a part."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@pytest.mark.parametrize(
    "schedule", ["single", "pytorch-1f1b", "pytorch-zbv", "pytorch-ddp", "pytorch-tp"]
)
def test_loss_and_gradients_are_ours(ranks: "RankPool", schedule: str) -> None:
    loss, gradients = ours()
    results = ranks.run(of_rank, 2, schedule=schedule)
    assert sum(part for part, _ in results) == pytest.approx(loss, rel=1e-6)
    theirs = {name: gradient for _, own in results for name, gradient in own.items()}
    assert theirs.keys() == gradients.keys()
    for name, gradient in gradients.items():
        error = torch.linalg.vector_norm(theirs[name] - gradient[: len(theirs[name])])
        assert error <= 1e-5 * torch.linalg.vector_norm(gradient), name
