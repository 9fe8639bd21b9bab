"""Tensor parallelism beside PyTorch's own: the plain GPT with its matrices as DTensors."""

from dataclasses import replace

import pytest
from correctness.agreement import errors
from correctness.rank_runs import assemble, train_on_rank
from correctness.short_runs import EIGHT_LAYER_GPT, Job, Layout
from harness.marks import full
from harness.rank_pool import RankPool
from reference.plain_gpt import Parameters
from reference.plain_loss import Microbatch, loss_and_gradients
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

GPT = replace(EIGHT_LAYER_GPT, num_layers=4, tie_embeddings=False)
JOB = Job(GPT, 2, microbatches=4, masked_out=(1,), iterations=1, sequence=12)
CUT = {"linear_qkv": 0, "linear_fc1": 0, "linear_proj": 1, "linear_fc2": 1, "output_layer": 0}
"""The dimension in which ranks share a matrix; of its bias, where that is cut too, it is 0."""


def placement_of(name: str) -> Placement:
    """Where DTensor has a parameter: shared by the ranks, or whole on each."""
    *_, module, kind = name.split(".")
    dimension = CUT.get(module)
    if dimension is None or (kind == "bias" and dimension):
        return Replicate()
    return Shard(dimension)


def dtensors_on_rank(
    rank: int, world_size: int, *, parameters: Parameters, batch: list[Microbatch]
) -> tuple[float, Parameters]:
    """Loss and gradients of one global batch by autograd over DTensors."""
    mesh = init_device_mesh("cpu", (world_size,))
    shared: dict[str, Tensor] = {
        name: distribute_tensor(value, mesh, [placement_of(name)])
        for name, value in parameters.items()
    }
    with implicit_replication():
        loss, gradients = loss_and_gradients(shared, batch, GPT)
    whole = {}
    for name, gradient in gradients.items():
        assert isinstance(gradient, DTensor)
        whole[name] = gradient.full_tensor()
    return loss, whole


@pytest.mark.parametrize(
    "layout",
    [
        Layout(1, "vocab-2", tensor=2, sequence=True),
        full(Layout(2, "vocab-2", tensor=2, sequence=True)),
        full(Layout(1, "none", tensor=2)),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_dtensors(layout: Layout, ranks: RankPool) -> None:
    batches = JOB.batches()
    by_rank = ranks.run(
        train_on_rank, layout.world_size, config=JOB.config(layout), batches=batches
    )
    start = {name: value.double() for name, value in assemble([o.initial for o in by_rank]).items()}
    [loss, other], [gradients, same] = zip(
        *ranks.run(dtensors_on_rank, 2, parameters=start, batch=batches[0]), strict=True
    )
    alone, expected = loss_and_gradients(start, batches[0], GPT)
    assert loss == other == pytest.approx(alone, rel=1e-12)
    assert max(errors(gradients, expected).values()) < 1e-10
    assert max(errors(same, expected).values()) < 1e-10
    assert by_rank[0].losses == [pytest.approx(loss, rel=1e-5)]
    found = assemble([own.first_gradients for own in by_rank])
    assert max(errors(found, gradients).values()) < 1e-5
